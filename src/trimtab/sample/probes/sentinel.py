"""One parameter listened to: is its gradient what the backward passes of this step gave, or is something else in it?

A hook on one weight sees every gradient that arrives there, before it is added up. At the step the gradient must be the
sum of what arrived (perhaps scaled by the loop's own clipping or unscaling). If the gradient of the step before is in
it as well, it was never zeroed. The same few hundred numbers tell whether successive gradients point the same way.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.hooks import unserializable_hook

from trimtab.core.contain import Contained
from trimtab.sample.measure.reference import DOTS, KINDS, PAIRS
from trimtab.sample.probes.batch import can_be_sent
from trimtab.sample.transfer import Later, Notes, is_here, number, sent, to_host
from trimtab.torchutil.patch import own_hook

SIZE = 512
MIN_SIZE = 16
TOLERANCE = 2e-3
LOOSE = 2e-2  # for gradients kept in 16 bits
EARLY, EVERY, RUN = 16, 20, 4
"""It listens in the first steps, and then in a few of every twenty."""


_ALL = tuple(f"dots/{i}" for i in range(16))


class Products:
    """The four vectors of one step on a device, whose products tell what its gradient is made of."""

    def __init__(self, arrived: Tensor, grad: Tensor, left: Tensor | None, before: Tensor | None) -> None:
        self.vectors = arrived, grad, left, before
        self.dense = all(v is None or (v.dtype is arrived.dtype and v.is_contiguous()) for v in self.vectors)
        self.dense = self.dense and arrived.dtype in KINDS

    def computed(self) -> Tensor:
        """All of them with each other, on the device."""
        arrived, grad, left, before = self.vectors
        none = torch.zeros_like(arrived) if left is None or before is None else arrived
        four = torch.stack([arrived, grad, none if left is None else left, none if before is None else before]).float()
        return (four.unsqueeze(0) * four.unsqueeze(1)).sum(2)  # no matrix product: TF32 would lose half of the digits


class Sentinel:
    """Listens to one parameter of one optimizer."""

    num_steps = 0
    """Of all optimizers that are listened to in this process."""

    def __init__(self, contained: Contained) -> None:
        self._contained = contained
        self._param: Tensor | None = None
        self.chosen = False  # whether there is a parameter to listen to
        self._hook: Any = None  # there while it listens: a hook costs even when it does nothing
        self._arrived: Any = None
        self._left: Any = None
        self._before: Any = None
        self._num = 0
        self._since: tuple[int, int] | None = None  # steps of all optimizers, and writes to the weight, at the first
        self._listening = True
        self._mark: tuple[weakref.ref[Tensor], int] | None = None
        self._products: Products | None = None
        self._later: list[Later] = []
        self._blank: list[Tensor | bool] = []  # of each gradient of this step that was added: whether to nothing
        self._last: Any = None  # the gradient of this step that arrived last
        self._again: list[Tensor | bool] = []  # of each that came after another: whether it is the same one

    def take_products(self) -> Products | None:
        """What is left to multiply on a device, for who sends the step's values to the host."""
        products, self._products = self._products, None
        return products

    def choose(self, params: list[Tensor]) -> None:
        """Listen to the last weight that has a gradient: the head of a model takes part in every loss."""
        best = next((p for p in reversed(params) if p.numel() >= 4 * MIN_SIZE and _can_be_heard(p)), None)
        if best is None:
            fit = [p for p in params if _can_be_heard(p)]
            best = next(iter([p for p in fit if p.dim() >= 2][-1:] or fit[-1:]), None)
        if best is not None:
            self._param, self.chosen = best, True
            if self._listening:
                self._listen(best)

    def remove(self) -> None:
        """Stop listening."""
        if self._hook is not None:
            self._hook.remove()
        self._param = self._hook = None
        self.chosen = False

    def _listen(self, param: Tensor) -> None:
        if self._hook is None:
            # Marked, or else saving a plain tensor would warn of it.
            hook = unserializable_hook(self._contained.hook("listening to a gradient", self._on_gradient))  # type: ignore[no-untyped-call]
            self._hook = own_hook(param.register_hook(hook))  # type: ignore[no-untyped-call]

    def _on_gradient(self, grad: Tensor) -> None:
        self._num += 1
        part = _leading(grad)
        if self._param is not None and _is_added(self._param):
            self._pile_up(self._param)
            if self._last is not None and self._last.shape == part.shape:
                again = (part == self._last).all() & part.any()
                self._again.append(again if isinstance(again, Tensor) else bool(again))
        # A copy: the engine may hand this very memory on and add to it.
        self._last = part + 0
        if self._arrived is None:
            self._arrived = self._last
        else:
            with np.errstate(all="ignore"):
                self._arrived = self._arrived + part

    def _pile_up(self, param: Tensor) -> None:
        """A gradient is about to be added to the others of this step; where there are none left, they were dropped."""
        if self._since is None:
            self._since = Sentinel.num_steps, param._version
        old = param.grad
        blank: Tensor | bool = False
        if self._blank and old is not None and old.layout is torch.strided and can_be_sent(old):
            left, came = _leading(old).any(), self._last.any()  # where only zeros came before, nothing was dropped
            blank = ~left & came if isinstance(left, Tensor) else bool(came and not left)
        self._blank.append(True if old is None else blank)

    def before(self, step: int, scale: float | Tensor) -> dict[str, float | Tensor]:
        """At the step, before anything of ours changed the gradient: what it is made of."""
        out: dict[str, float | Tensor] = {}
        param, num, heard = self._param, self._num, self._hook is not None
        arrived, self._arrived, self._num = self._arrived, None, 0
        blank, self._blank = self._blank, []
        again, self._again, self._last = self._again, [], None
        since, self._since = self._since, None
        if param is None:
            return out
        self._listening = step + 1 < EARLY or (step + 1) % EVERY < RUN
        grad = param.grad
        # By the object: a gradient made by hand may lie where the last one did.
        if self._mark is not None and self._mark[0]() is grad and grad is not None and self._mark[1] == grad._version:
            out["same_gradients"] = 1.0  # a backward would have written to it
        if not heard:
            self._before = None  # the next one heard has none right before it
            return out
        if num != 1:
            out["backwards"] = float(num)
        # A weight that was moved in between, or another optimizer's step, is a reason to start over.
        if num > 1 and since == (Sentinel.num_steps, param._version):
            self._count(blank, out, "dropped", dropped_of)
            self._count(again, out, "doubled", sum)
        if grad is None or grad.layout is not param.layout:
            self._before = self._left = None
            return out
        if arrived is not None:
            now = _leading(grad)
            old = [None if v is None or v.shape != now.shape else v for v in (self._left, self._before)]
            tolerance = TOLERANCE if grad.element_size() >= 4 else LOOSE
            self._before = arrived
            if isinstance(arrived, Tensor):
                if arrived.shape == now.shape:
                    self._products = Products(arrived, now, *old)
                    out["dots/tolerance"], out["dots/scale"], out["dots/num"] = tolerance, scale, float(len(now))
                    if len(now) < MIN_SIZE and old[0] is not None and can_be_sent(now):
                        self._send(now, arrived, old[0])
            else:
                with np.errstate(all="ignore"):  # huge and non-finite values may well be in it
                    dots = _dots(arrived, now, *old) if arrived.shape == now.shape else [0.0] * len(DOTS)
                out |= facts_of(dots, tolerance, number(scale), len(now))
                if "carried" not in out and old[0] is not None and _is_sum(now, arrived, old[0]):
                    out["carried"] = 1.0
        return out

    def _count(
        self, flags: list[Tensor | bool], out: dict[str, float | Tensor], name: str, count: Callable[[list[bool]], int]
    ) -> None:
        """Say how many gradients of this step a count of their flags gives; of flags on a device, when it is due."""
        asked = [one for one in flags if isinstance(one, Tensor)]
        if not asked:
            if num := count([one for one in flags if not isinstance(one, Tensor)]):
                out[name] = float(num)
        elif can_be_sent(asked[0]):
            copies = sent(torch.stack(asked))

            def later(facts: dict[str, float], notes: Notes) -> None:
                found = iter(to_host(copies).tolist())
                if num := count([next(found) if isinstance(one, Tensor) else one for one in flags]):
                    facts[name] = float(num)

            self._later.append(later)

    def _send(self, now: Tensor, arrived: Tensor, left: Tensor) -> None:
        """Have the few numbers of a small weight looked at on the host, when the step is due."""
        copies = [sent(v.float()) for v in (now, arrived, left)]

        def later(facts: dict[str, float], notes: Notes) -> None:
            grad, whole, old = map(to_host, copies)
            if "carried" not in resolved(facts) and _is_sum(grad, whole, old):
                facts["carried"] = 1.0

        self._later.append(later)

    def take_later(self) -> list[Later]:
        """What was sent to be looked at on the host."""
        later, self._later = self._later, []
        return later

    def after(self) -> None:
        """After the step: remember what is left in the gradient, and that it was used."""
        Sentinel.num_steps += 1
        grad = self._param.grad if self._param is not None else None
        self._left = None
        if grad is None:
            self._mark = None
            return
        self._mark = weakref.ref(grad), grad._version
        if self._listening:
            self._left = _leading(grad) + 0
            self._listen(self._param)  # type: ignore[arg-type]
        elif self._hook is not None:
            self._hook.remove()
            self._hook = None


def _can_be_heard(param: Tensor) -> bool:
    grad = param.grad
    if grad is None or not param.requires_grad or not param.is_floating_point() or grad.layout is not param.layout:
        return False
    return not hasattr(param, "to_local")


def dropped_of(blank: Sequence[object]) -> int:
    """How many gradients were dropped: all that were added before one that was added to nothing."""
    added = dropped = 0
    for one in blank:
        if added and one:
            dropped, added = dropped + added, 0
        added += 1
    return dropped


def _is_added(param: Tensor) -> bool:
    """Whether the pass under way adds to the gradient of a leaf: `torch.autograd.grad` hands it to its caller only."""
    try:
        added: bool = torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(param).node)
    except RuntimeError:  # of a leaf that `torch.autograd.grad` was asked for it cannot be told
        return False
    return added


def _is_sum(grad: Any, arrived: Any, left: Any) -> bool:
    """Whether a gradient is exactly what arrived and what was left: too few numbers for products may say that."""
    if len(grad) >= MIN_SIZE or len(grad) < 2 or not left.any() or not arrived.any():
        return False
    if not np.isfinite(grad).all() or not np.isfinite(arrived).all() or not np.isfinite(left).all():
        return False
    close = 1e-5 * float(np.abs(grad).max())
    if np.allclose(grad, arrived, rtol=1e-2):
        return False
    return np.allclose(grad, arrived + left, rtol=1e-5, atol=close)


def resolved(scalars: dict[str, float]) -> dict[str, float]:
    """The same dict, with the facts in place of the products that a device sent."""
    if DOTS[0] not in scalars:
        return scalars
    every = {name: scalars.pop(name, 0.0) for name in _ALL}
    dots = [every[name] for name in DOTS]
    num = int(scalars.pop("dots/num"))
    scalars |= facts_of(dots, scalars.pop("dots/tolerance"), scalars.pop("dots/scale"), num)
    return scalars


def facts_of(dots: Sequence[float], tolerance: float, scale: float, num: int = SIZE) -> dict[str, float]:
    """What the products of arrived, gradient, left and the arrived of the step before say."""
    *mine, cb, bb = dots
    handed, carried = made_of(mine, tolerance, num)
    out: dict[str, float] = {}
    if handed is not None:
        out["handed"] = handed * scale
        if mine[0] * bb > 0 and math.isfinite(mine[0] * bb):
            out["grad_cos"] = cb / math.sqrt(mine[0] * bb)
    if carried is not None:
        out["carried"] = carried
    return out


def made_of(dots: Sequence[float], tolerance: float, num: int = SIZE) -> tuple[float | None, float | None]:
    """How much of what arrived, and how much of what was left from before, a gradient is made of.

    The second is relative to the first: 0 where the gradient was zeroed, 1 where it was not. None where the numbers do
    not say: something else was added, or the two cannot be told apart.
    """
    cc, cg, gg, co, go, oo = dots
    if not (cc > 0 and gg > 0 and math.isfinite(cc) and math.isfinite(gg)):
        return None, None
    a = cg / cc
    alone = gg - a * cg <= (tolerance**2) * gg
    if alone:
        if oo == 0.0 or a < 1.5:
            return a, 0.0 if a > 0 else None
        # More than arrived: what was left points the same way (a full batch at a small rate does that).
        return 1.0, (a - 1.0) * math.sqrt(cc / oo)
    if num < MIN_SIZE:
        return None, None  # so few numbers can be made of any two others
    det = cc * oo - co * co
    if oo == 0.0 or not math.isfinite(det) or det <= 1e-6 * cc * oo:
        return None, None
    a, b = (cg * oo - go * co) / det, (go * cc - cg * co) / det
    rest = gg - a * cg - b * go
    if rest > (tolerance**2) * gg or a <= 0:
        return None, None
    return a, b / a


def _dots(*rows: Any) -> list[float]:
    """Products of four vectors on the host, in the order of `DOTS`."""
    return [0.0 if rows[i] is None or rows[j] is None else float(np.dot(rows[i], rows[j])) for i, j in PAIRS]


def _leading(grad: Tensor) -> Any:
    """The first elements: numpy on the host, where its small products are ten times as fast; else a tensor."""
    here = is_here(grad)
    if not here and grad.is_contiguous() and not grad.requires_grad:  # one view instead of three
        return grad.as_strided((min(grad.numel(), SIZE),), (1,), grad.storage_offset())
    if not here:
        return grad.detach().reshape(-1)[:SIZE]
    values = to_host(grad).reshape(-1)[:SIZE]  # views of an array cost less than those of a tensor
    return values if values.dtype in (np.float32, np.float64) else values.astype(np.float32)
