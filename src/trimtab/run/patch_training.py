"""Sees what a script does itself: the losses it calls `backward()` on, and its own `clip_grad_norm_`."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trimtab.core.contain import Contained
from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import number
from trimtab.torchutil.patch import wrap_attribute

Told = Callable[[list[Tensor], Tensor | float], bool]
"""Called with the parameters and their norm before clipping; says whether a bad update is kept out by a guard."""


def wrap_clip_grad_norm(told: Told, contained: Contained) -> Callable[[], None]:
    """Put a wrapper in the place of `torch.nn.utils.clip_grad_norm_`; returns how to take it off again.

    On finite gradients the result is bit for bit that of PyTorch. Where a guard keeps the update out anyway, a
    non-finite gradient stays where it arose, so that it can be named; and finite gradients whose norm overflows are
    clipped, not zeroed.
    """
    homes: tuple[Any, ...] = (torch.nn.utils, torch.nn.utils.clip_grad)
    inner = torch.nn.utils.clip_grad_norm_
    total_norm, scale = torch.nn.utils.get_total_norm, torch.nn.utils.clip_grads_with_norm_

    def kept_out(params: list[Tensor], grads: list[Tensor], norm: Tensor) -> float | None:
        """The true norm where a guard keeps a bad update out, else None."""
        true = number(norm)
        if not math.isfinite(true):
            true = number(measure.total(measure.wide_norms([measure.plain(g) for g in grads])))
        return true if told(params, true) else None

    @functools.wraps(inner)
    def clip_grad_norm_(
        parameters: Any,
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
            contained.call("noting a norm", told, params, norm)
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
        home.clip_grad_norm_ = clip_grad_norm_

    def undo() -> None:
        for home in homes:
            home.clip_grad_norm_ = inner

    return undo


Marks = Mapping[int, object]
"""By optimizer, something that changes whenever one of its gradients does."""


@dataclass(slots=True)
class _Seen:
    """A loss, which optimizers its backward gave gradients to, of those that were known, and who was told."""

    loss: Tensor
    known: frozenset[int]
    touched: frozenset[int]
    told: set[int]


class _Round(threading.local):
    """What one thread called backward on since the last step of any optimizer."""

    def __init__(self) -> None:
        self.losses: list[_Seen] = []
        self.stepped = False
        self.scaled: tuple[Tensor, Tensor, Tensor] | None = None  # what scale() made, of what, and by how much


class Losses:
    """Listens to `torch.autograd.backward` (which `Tensor.backward` calls) and to `GradScaler.scale`."""

    def __init__(
        self, marks: Callable[[], Marks], contained: Contained, called: Callable[[], None] = lambda: None
    ) -> None:
        self._round, self._contained = _Round(), contained
        self._marks, self._called = marks, called
        self._undo: list[Callable[[], None]] = []
        self.rivals: set[int] = set()
        """Optimizers that got gradients from one backward pass: one model may be what another one works against."""

    def listen(self) -> None:
        """Put the wrappers in place."""
        self._undo = [
            wrap_attribute(torch.autograd, "backward", self._around_backward, while_compiling=False),
            wrap_attribute(torch.amp.GradScaler, "scale", self._around_scale),
        ]

    def _around_backward(self, inner: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        before = self._contained.call("looking at gradients", self._marks, default={})
        out = inner(tensors, *args, **kwargs)
        self._contained.call("hearing of a backward pass", self._called)
        self._contained.call("seeing a loss", self._see, tensors, before)
        return out

    def _around_scale(self, inner: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        out = inner(scaler, outputs)
        self._contained.call("seeing a scaled loss", self._scaled, scaler, outputs, out)
        return out

    def remove(self) -> None:
        """Take the wrappers off again."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def _scaled(self, scaler: Any, outputs: Any, out: Any) -> None:
        if isinstance(outputs, Tensor) and isinstance(out, Tensor) and out is not outputs:
            by = getattr(scaler, "_scale", None)
            if isinstance(by, Tensor):
                self._round.scaled = (out, outputs, by.detach().clone())

    def _see(self, tensors: Any, before: Marks) -> None:
        mine, after = self._round, self._marks()
        if mine.stepped:
            mine.losses, mine.stepped = [], False
        scaled, mine.scaled = mine.scaled, None
        touched = frozenset(key for key, mark in after.items() if mark != before.get(key))
        if len(touched) > 1:
            self.rivals |= touched
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tuple(tensors):
            if isinstance(tensor, Tensor) and tensor.numel() == 1 and tensor.is_floating_point():
                mine.losses.append(_Seen(_unscaled(tensor, scaled), frozenset(before), touched, set()))

    def take(self, optimizer: int, guard: int) -> list[Tensor]:
        """The losses that this optimizer steps on now, those that its guard was not told yet.

        Another optimizer that steps on the same backward sees them, too; one that got no gradient from it does not.
        """
        self._round.stepped = True
        mine = [s for s in self._round.losses if optimizer in s.touched or optimizer not in s.known]
        new = [s for s in mine if guard not in s.told]
        for seen in new:
            seen.told.add(guard)
        return [seen.loss for seen in new]

    def ended(self, closure: bool) -> None:
        """A step is over; what a closure called backward on inside it was told already."""
        self._round.stepped = True
        if closure:
            self._round.losses = []


def _unscaled(tensor: Tensor, scaled: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    if scaled is None:
        return tensor
    made, original, by = scaled
    # Divided for accumulation after scaling: take only the scale out again.
    return original if made is tensor else tensor.detach() / by.to(tensor.device)
