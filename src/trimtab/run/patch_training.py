"""Sees what a script does itself: the losses it calls `backward()` on, and its own `clip_grad_norm_`."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.amp import GradScaler

from trimtab.core.contain import Contained
from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import number
from trimtab.torchutil.patch import wrap_attribute

NAME = "clip_grad_norm_"
Tensors = Tensor | Sequence[Tensor]
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

Clipped = Callable[[list[Tensor], Tensor | float], bool]
"""Called with the parameters and their norm before clipping; returns whether a guard rejects bad updates."""


def wrap_clip_grad_norm(clipped: Clipped, contained: Contained) -> Callable[[], None]:
    """Replace `torch.nn.utils.clip_grad_norm_` by a wrapper; returns the undo function.

    On finite gradients the result is bit-identical to that of PyTorch. Where a guard rejects the update anyway, a
    non-finite gradient stays where it arose, so that the guard can name it, and finite gradients whose norm overflows
    are clipped, not zeroed.
    """
    homes = (torch.nn.utils, torch.nn.utils.clip_grad)
    inner = torch.nn.utils.clip_grad_norm_
    total_norm, scale = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_

    def kept_out(params: list[Tensor], grads: list[Tensor], norm: Tensor) -> float | None:
        """The true norm if a guard rejects bad updates, else None."""
        true = number(norm)
        if not math.isfinite(true):
            true = number(measure.total(measure.wide_norms([measure.plain(g) for g in grads])))
        return true if clipped(params, true) else None

    @functools.wraps(inner)
    def clip_grad_norm_(
        parameters: Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        if isinstance(parameters, Tensor):
            parameters = [parameters]
        params = list(parameters)
        if not params:
            return inner((p for p in params), max_norm, norm_type, error_if_nonfinite, foreach)  # it warns of these
        grads = [p.grad for p in params if p.grad is not None]
        plain = all(type(g) is Tensor and g.is_cpu and g.layout is torch.strided for g in grads)
        if not grads or float(norm_type) != 2.0 or torch.compiler.is_compiling():
            return inner(params, max_norm, norm_type, error_if_nonfinite, foreach)
        if not plain or error_if_nonfinite:  # an error is PyTorch's own to raise
            norm = inner(params, max_norm, norm_type, error_if_nonfinite, foreach)
            contained.call("noting a norm", clipped, params, norm)
            return norm
        norm = total_norm(grads, norm_type, error_if_nonfinite, foreach)
        finite = math.isfinite(float(norm))
        true: float | None = contained.call("noting a norm", kept_out, params, grads, norm)
        if finite or true is None:
            scale(params, max_norm, norm, foreach)
        elif math.isfinite(true):
            with torch.no_grad():
                torch._foreach_mul_(grads, float(max_norm) / true)
        return norm

    for home in homes:
        setattr(home, NAME, clip_grad_norm_)

    def undo() -> None:
        for home in homes:
            setattr(home, NAME, inner)

    return undo


Marks = Mapping[int, object]
"""By optimizer, something that changes whenever one of its gradients does."""


@dataclass(slots=True)
class _Seen:
    """A loss, the optimizers known at its backward, those that got gradients from it, and the guards that have it."""

    loss: Tensor
    known: frozenset[int]
    touched: frozenset[int]
    guards: set[int]


class _Round(threading.local):
    """The losses that one thread called `backward` on since the last step of any optimizer."""

    def __init__(self) -> None:
        self.losses: list[_Seen] = []
        self.stepped = False
        self.scaled: tuple[Tensor, Tensor, Tensor] | None = None  # result, argument and scale of the last scale()


class Losses:
    """Listens to `torch.autograd.backward` (which `Tensor.backward` calls) and to `GradScaler.scale`."""

    def __init__(
        self, marks: Callable[[], Marks], contained: Contained, called: Callable[[], None] = lambda: None
    ) -> None:
        self._round, self._contained = _Round(), contained
        self._marks, self._called = marks, called
        self._undo: list[Callable[[], None]] = []
        self.rivals: set[int] = set()
        """Optimizers that got gradients from the same backward pass: their models may be adversaries."""

    def listen(self) -> None:
        """Install the wrappers."""
        self._undo = [
            wrap_attribute(torch.autograd, "backward", self._around_backward, while_compiling=False),
            wrap_attribute(GradScaler, "scale", self._around_scale),
        ]

    def _around_backward(
        self, inner: Callable[Concatenate[Tensors, P], R], tensors: Tensors, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        try:
            before = self._marks()
        except Exception as error:
            self._contained.report("looking at gradients", error)
            before = {}
        out = inner(tensors, *args, **kwargs)
        try:
            self._see(tensors, before)
        except Exception as error:
            self._contained.report("seeing a loss", error)
        return out

    def _around_scale(self, inner: Callable[[GradScaler, S], S], scaler: GradScaler, outputs: S) -> S:
        out = inner(scaler, outputs)
        self._contained.call("seeing a scaled loss", self._scaled, scaler, outputs, out)
        return out

    def remove(self) -> None:
        """Remove the wrappers."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _scaled(self, scaler: GradScaler, outputs: object, out: object) -> None:
        if isinstance(outputs, Tensor) and isinstance(out, Tensor) and out is not outputs:
            by = getattr(scaler, "_scale", None)
            if isinstance(by, Tensor):
                self._round.scaled = (out, outputs, by.detach().clone())

    def _see(self, tensors: Tensors, before: Marks) -> None:
        mine, after = self._round, self._marks()
        if mine.stepped:
            mine.losses, mine.stepped = [], False
        scaled, mine.scaled = mine.scaled, None
        touched = frozenset([key for key, mark in after.items() if mark != before.get(key)])
        if len(touched) > 1:
            self.rivals |= touched
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tuple(tensors):
            if isinstance(tensor, Tensor) and tensor.numel() == 1 and tensor.is_floating_point():
                mine.losses.append(_Seen(_unscaled(tensor, scaled), frozenset(before), touched, set()))
        self._called()

    def take(self, optimizer: int, guard: int) -> list[Tensor]:
        """The losses that this optimizer steps on now and that its guard does not have yet.

        Another optimizer that steps on the same backward gets them, too; one that got no gradient from it does not.
        """
        self._round.stepped = True
        new = []
        for seen in self._round.losses:
            if guard not in seen.guards and (optimizer in seen.touched or optimizer not in seen.known):
                seen.guards.add(guard)
                new.append(seen.loss)
        return new

    def ended(self, closure: bool) -> None:
        """A step is over; the guard has the losses of its closure already."""
        self._round.stepped = True
        if closure:
            self._round.losses = []


def _unscaled(tensor: Tensor, scaled: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    if scaled is None:
        return tensor
    made, original, by = scaled
    # Divided for accumulation after scaling: take only the scale out again.
    return original if made is tensor else tensor.detach() / by.to(tensor.device)
