"""Which units of the activations answer at all: hooks that are put on only where the settings ask for them.

Every few training forwards each activation's output is reduced to one mark per unit and added to a vector on its
device. Nothing waits for that device: at the end of a window of looks the worst layer leaves as a few device scalars,
among them its place in a list of names that the host knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.core.contain import Contained
from trimtab.sample.probes.batch import tensors_in
from trimtab.sample.probes.forward import inert, only_traced
from trimtab.torchutil.autograd_graph import first_inputs
from trimtab.torchutil.patch import own_hook, plain_python

LOOKS = 10
"""Looks in a window: a unit is dead if none of them saw it active."""
NUM_CALLS = 8
"""Calls of one module in one forward that are kept apart: blocks share a module, and a loop may call it without end."""
LEAST_DEAD = 8
LEAST_SATURATED = 4
"""Layers with fewer such units stand behind all others: a handful of units is no layer that fails."""
MOST = 0.95
"""A unit is saturated in a look if more than this share of its values is."""
OFTEN = 0.9
"""And in a window if it was so in this share of the looks."""
NUM_STEPS_BACK = 8
"""Operations before an activation among which a convolution is looked for."""
QUIET = 1e-3
"""Of the layer's root mean square: GELU and SiLU fade out instead of reaching 0."""

Mark = Callable[[Tensor, list[int]], Tensor]


@dataclass(slots=True, eq=False)
class _Layer:
    """One call of one activation: in how many looks of this window each unit was marked."""

    name: str
    marks: Tensor
    before: Tensor  # the share of dead or saturated units in the window before
    looks: int = 0
    address: int | None = None  # of the output in the forward under way
    is_answer: bool = False

    def share(self, *, bounded: bool) -> tuple[Tensor, Tensor]:
        """The share of troubled units, now that the window is over, and the lesser of this and the one before."""
        trouble = self.marks >= OFTEN * self.looks if bounded else self.marks == 0
        share = trouble.float().mean()
        lasting = torch.minimum(share, self.before)
        self.before, self.looks = share, 0
        self.marks.zero_()
        return share, lasting


class ActivationTap:
    """Looks at the outputs of a model's activations in every `every`-th training forward."""

    def __init__(self, model: nn.Module, contained: Contained, every: int = 5) -> None:
        self._model, self._every, self._contained = model, every, contained
        self._looking = self._rooted = self._broken = False
        self._num_forwards = self._num_looks = 0
        self._calls: dict[str, int] = {}
        self._dead: dict[tuple[str, int], _Layer] = {}
        self._saturated: dict[tuple[str, int], _Layer] = {}
        self._found: tuple[dict[str, float | Tensor], dict[str, tuple[str, ...]]] = ({}, {})
        self._modules: list[nn.Module] = []
        self._undo: list[Callable[[], None]] = []
        for name, module in model.named_modules():
            mark, bounded = mark_of(module)
            if mark is not None:
                self._modules.append(module)
                look = Hook(partial(self._look, name, mark, self._saturated if bounded else self._dead), self._fail)
                self._undo.append(own_hook(module.register_forward_hook(look), listed=False).remove)
        if self._modules:
            enter, leave = Hook(self._enter, self._fail), Hook(self._leave, self._fail)
            self._undo.append(own_hook(model.register_forward_pre_hook(enter), listed=False).remove)
            self._undo.append(own_hook(model.register_forward_hook(leave), listed=False).remove)
        self._arm()  # for a loop that calls the parts of the root but never the root itself

    def take(self) -> tuple[dict[str, float | Tensor], dict[str, tuple[str, ...]]]:
        """The facts and notes of a window that ended since the last step that asked; mostly there is none."""
        if not self._rooted and self._modules and not self._broken:
            with torch.no_grad():
                self._close()
            self._arm()
        out, self._found = self._found, ({}, {})
        return out

    def remove(self) -> None:
        """Take every hook off."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    # -- the hooks -----------------------------------------------------------------------------------------------

    def _enter(self, root: nn.Module, args: object) -> None:
        self._looking = False  # a forward that raised never left
        if torch.is_grad_enabled() and (root.training or any(m.training for m in self._modules)):
            if not self._rooted:
                self._rooted, self._num_forwards = True, 0
            self._arm()

    def _look(
        self,
        name: str,
        mark: Mark,
        layers: dict[tuple[str, int], _Layer],
        module: nn.Module,
        args: object,
        output: object,
    ) -> None:
        if not self._looking or not torch.is_grad_enabled() or not (module.training or self._model.training):
            return
        with torch.no_grad():
            self._add(name, mark, layers, output)

    def _leave(self, root: nn.Module, args: object, output: object) -> None:
        # What comes later, such as the second forward of gradient checkpointing, would be counted twice.
        if self._looking:
            with torch.no_grad():
                self._close(output)

    # -- the parts of a look -------------------------------------------------------------------------------------

    def _arm(self) -> None:
        self._looking = self._num_forwards % self._every == 0 and not self._broken
        self._num_forwards += 1
        self._calls.clear()

    def _add(self, name: str, mark: Mark, layers: dict[tuple[str, int], _Layer], output: object) -> None:
        # Frozen layers learn nothing anyway; a shard knows only part of its units.
        if not isinstance(output, Tensor) or not output.requires_grad or hasattr(output, "to_local"):
            return
        if not output.is_floating_point() or not 2 <= output.dim() <= 5 or not output.numel() or recorded(output):
            return
        call = self._calls[name] = min(self._calls.get(name, 0) + 1, NUM_CALLS)
        values = output.detach()
        units = unit_dim(output)
        marks = mark(values, [d for d in range(values.dim()) if d != units])
        layer = layers.get((name, call))
        if layer is None or layer.marks.shape != marks.shape or layer.marks.device != marks.device:
            label = name if call == 1 else f"{name} (call {call})"
            layer = layers[name, call] = _Layer(label, torch.zeros_like(marks), marks.new_zeros(()))
        layer.marks += marks
        layer.looks += 1
        layer.address = values.data_ptr() or None

    def _close(self, output: object = None) -> None:
        """A forward is over; every so many of them a window is."""
        if not self._looking:
            return
        self._looking = False
        fresh = [layer for layer in self._saturated.values() if layer.address is not None]
        answers = {t.data_ptr() for t in tensors_in(output) if t.layout is torch.strided} if fresh else ()
        for layer in fresh:
            layer.is_answer |= layer.address in answers
            layer.address = None
        self._num_looks += 1
        if self._num_looks >= LOOKS:
            self._num_looks = 0
            # A branch that is taken now and then is judged at the end of a later window, when it was seen as often.
            dead = [layer for layer in self._dead.values() if layer.looks >= LOOKS]
            # The more certain a classifier is the more its last sigmoid saturates.
            saturated = [x for x in self._saturated.values() if x.looks >= LOOKS and not x.is_answer]
            facts, notes = _worst("dead", dead, LEAST_DEAD, bounded=False)
            more, names = _worst("saturated", saturated, LEAST_SATURATED, bounded=True)
            self._found = ({**facts, **more, "act_layers": float(len(dead) + len(saturated))}, {**notes, **names})

    def _fail(self, error: Exception) -> None:
        """What breaks here must not break the forward it looks at: it is reported once and switched off."""
        self._broken, self._looking = True, False
        self._contained.report("looking at activations", error)


class Hook:
    """Calls a method, or tells what it raised; a copied model carries only an inert stand-in."""

    def __init__(self, method: Callable[..., None], failed: Callable[[Exception], None]) -> None:
        self._method, self._failed = method, failed

    @plain_python
    def __call__(self, *args: object) -> None:
        """Look, unless the call is only being compiled."""
        try:
            if not only_traced():
                self._method(*args)
        except Exception as error:
            self._failed(error)

    def __reduce__(self) -> Any:
        return inert()


def mark_of(module: nn.Module) -> tuple[Mark | None, bool]:
    """How the units of an activation are marked, and whether that means saturated; None where they cannot die."""
    if isinstance(module, nn.ReLU | nn.ReLU6):
        return partial(_above, floor=0.0), False
    if isinstance(module, nn.ELU):
        return partial(_above, floor=-0.99 * module.alpha), False  # below it the slope is less than a hundredth
    if isinstance(module, nn.GELU | nn.SiLU):
        return _audible, False
    bounds = bounds_of(module)
    return (None, False) if bounds is None else (partial(_outside, low=bounds[0], high=bounds[1]), True)


def bounds_of(module: nn.Module) -> tuple[float, float] | None:
    """Outside of which values a bounded activation hardly passes a gradient on; None where it is not bounded."""
    if isinstance(module, nn.Tanh | nn.Softsign):
        return -0.99, 0.99
    if isinstance(module, nn.Sigmoid | nn.Hardsigmoid):
        return 0.01, 0.99
    if isinstance(module, nn.Hardtanh):
        margin = 0.005 * (module.max_val - module.min_val)
        return module.min_val + margin, module.max_val - margin
    return None


def unit_dim(output: Tensor) -> int:
    """Which dimension of an output counts its units: channels after a convolution, else features, which come last."""
    if output.dim() != 3:
        return output.dim() - 1 if output.dim() < 4 else 1
    # (batch, channels, length) and (batch, time, features) look alike: the graph knows where they come from.
    reshaped = False
    for node in islice(first_inputs(output.grad_fn), NUM_STEPS_BACK):
        name = node.name()
        if name.startswith("Convolution") or ("BatchNorm" in name and not reshaped):
            return 1
        if name.startswith(("Transpose", "Permute", "Addmm", "Mm", "Bmm", "NativeLayerNorm")):
            break
        reshaped |= "View" in name
    return 2


def _above(values: Tensor, dims: list[int], floor: float) -> Tensor:
    return (~(values.amax(dims) <= floor)).float()  # written so that NaN, which is no silence, counts as active


def _audible(values: Tensor, dims: list[int]) -> Tensor:
    wide = None if values.dtype in (torch.float32, torch.float64) else torch.float32
    size: Tensor = torch.linalg.vector_norm(values, dtype=wide) / math.sqrt(values.numel())
    loudest = torch.maximum(values.amax(dims), -values.amin(dims))  # the size of each value would be a whole copy
    return (~(loudest <= QUIET * size)).float()


def _outside(values: Tensor, dims: list[int], low: float, high: float) -> Tensor:
    num = ((values < low) | (values > high)).sum(dims)
    return (num > MOST * math.prod(values.shape[d] for d in dims)).float()


def _worst(
    word: str, layers: list[_Layer], least: int, *, bounded: bool
) -> tuple[dict[str, float | Tensor], dict[str, tuple[str, ...]]]:
    """The largest share of any layer, and of which layer it has been large for two windows."""
    if not layers:
        return {}, {}
    home = layers[0].marks.device
    pairs = [layer.share(bounded=bounded) for layer in layers]
    shares, lasting = (torch.stack([t.to(home) for t in column]) for column in zip(*pairs, strict=True))
    # Filled on the device: a list of numbers sent there would make the host wait.
    widths = torch.stack(
        [torch.full((), float(layer.marks.numel()), device=home, dtype=torch.float32) for layer in layers]
    )
    units = (shares * widths).round()
    place = (lasting + (units >= least)).argmax()
    return {
        f"{word}_share": shares.max(),
        f"{word}_lasting": lasting.take(place),
        f"{word}_units": units.take(place),
        f"{word}_of": widths.take(place),
        f"{word}_layer": place,
    }, {word: tuple(layer.name for layer in layers)}


def recorded(output: Tensor) -> bool:
    """Whether this forward is only recorded (a trace, a CUDA graph) or transformed: its values are nobody's to keep."""
    if torch._C._get_tracing_state() is not None or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return output.is_cuda and torch.cuda.is_current_stream_capturing()


@dataclass(slots=True, eq=False)
class Activity:
    """What one window of forwards looked like: sums on the device, counts on the host."""

    sums: Tensor  # sum, sum of squares, zeros
    low: Tensor
    high: Tensor
    loudest: Tensor | None = None  # per unit, the largest distance from silence
    at_bounds: Tensor | None = None  # per unit, how many values were
    num_values: int = 0
    num_per_unit: int = 0
    num_forwards: int = 0


def empty(values: Tensor) -> Activity:
    """Nothing seen yet, on the device of these values."""
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    start = torch.zeros(3, dtype=wide, device=values.device)
    return Activity(start, torch.full_like(start[0], torch.inf), torch.full_like(start[0], -torch.inf))


def take_in(
    window: Activity, values: Tensor, unit: int | None, floor: float | None, bounds: tuple[float, float] | None
) -> None:
    """Add one output: per unit how far from `floor` it got, and how often it was outside of `bounds`, where given."""
    wide = window.sums.dtype
    square = torch.linalg.vector_norm(values, dtype=wide).square()
    zeros = values.numel() - torch.count_nonzero(values)
    # Never in place: a tensor made in inference mode must not be changed outside of it.
    window.sums = window.sums + torch.stack([values.sum(dtype=wide), square, zeros.to(wide)])
    low, high = torch.aminmax(values)
    window.low, window.high = torch.minimum(window.low, low.to(wide)), torch.maximum(window.high, high.to(wide))
    window.num_values += values.numel()
    window.num_forwards += 1
    if unit is None:
        return
    rest = [d for d in range(values.dim()) if d != unit]
    window.num_per_unit += values.numel() // values.shape[unit]
    if floor is not None:
        loud = torch.maximum(values.amax(rest) - floor, floor - values.amin(rest)).to(wide)
        window.loudest = loud if window.loudest is None else torch.maximum(window.loudest, loud)
    if bounds is not None:
        at = ((values < bounds[0]) | (values > bounds[1])).sum(rest).to(wide)
        window.at_bounds = at if window.at_bounds is None else window.at_bounds + at
