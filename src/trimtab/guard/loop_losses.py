"""Sees the losses that a loop calls `backward()` on, without being told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.amp import GradScaler

from trimtab.core.contain import Contained
from trimtab.sample.transfer import is_here, number
from trimtab.torchutil.patch import wrap_attribute

Tensors = Tensor | Sequence[Tensor]
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")

MOST_NODES = 3
"""How far into the graph of a loss a division is looked for: a loss scale may come after it."""
MOST_SCALED = 4096.0
"""Nobody accumulates more losses than this for a step."""
NEARLY = 1e-4

Marks = Mapping[int, object]
"""By optimizer, something that changes whenever one of its gradients does."""


@dataclass(slots=True)
class _Seen:
    """A loss, what it was divided by last, the optimizers known at its backward, those that got gradients from it, and
    the guards that have it."""

    loss: Tensor
    divisor: float
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
        self._divisors: dict[int, float] = {}  # by optimizer, what its loop divides losses by to accumulate them
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
            divisor = _divisor(tensors)  # now: `backward` frees what the graph holds
        except Exception as error:
            self._contained.report("looking at gradients", error)
            before, divisor = {}, 1.0
        out = inner(tensors, *args, **kwargs)
        try:
            self._see(tensors, before, divisor)
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

    def _see(self, tensors: Tensors, before: Marks, divisor: float) -> None:
        mine, after = self._round, self._marks()
        if mine.stepped:
            mine.losses, mine.stepped = [], False
        scaled, mine.scaled = mine.scaled, None
        touched = frozenset([key for key, mark in after.items() if mark != before.get(key)])
        if len(touched) > 1:
            self.rivals |= touched
        for tensor in (tensors,) if isinstance(tensors, Tensor) else tuple(tensors):
            if isinstance(tensor, Tensor) and tensor.numel() == 1 and tensor.is_floating_point():
                loss = _unscaled(tensor, scaled)
                mine.losses.append(_Seen(loss, divisor, frozenset(before), touched, set()))
        self._called()

    def take(self, optimizer: int, guard: int) -> list[Tensor]:
        """The losses that this optimizer steps on now and that its guard does not have yet.

        Another optimizer that steps on the same backward gets them, too; one that got no gradient from it does not.
        """
        self._round.stepped = True
        new: list[_Seen] = []
        for seen in self._round.losses:
            if guard not in seen.guards and (optimizer in seen.touched or optimizer not in seen.known):
                seen.guards.add(guard)
                new.append(seen)
        return self._undivided(optimizer, new)

    def _undivided(self, optimizer: int, new: list[_Seen]) -> list[Tensor]:
        """The losses as they were before the loop divided each by their number, in order to accumulate gradients.

        Where one step had as many losses as each was divided by, later ones are read that way, too: the last step of an
        epoch may have fewer.
        """
        num = len(new)
        if num > 1 and all(abs(seen.divisor - num) < NEARLY * num for seen in new):
            self._divisors[optimizer] = float(num)
        by = self._divisors.get(optimizer)
        if by is None:
            return [seen.loss for seen in new]
        return [seen.loss * by if abs(seen.divisor - by) < NEARLY * by else seen.loss for seen in new]

    def ended(self, closure: bool) -> None:
        """A step is over; the guard has the losses of its closure already."""
        self._round.stepped = True
        if closure:
            self._round.losses = []


def _divisor(tensors: Tensors) -> float:
    """What the loss was divided by, or multiplied with the inverse of, right before `backward`; else 1."""
    node = tensors.grad_fn if isinstance(tensors, Tensor) else None
    for _ in range(MOST_NODES):
        kind = type(node).__name__
        if kind not in ("DivBackward0", "MulBackward0"):
            return 1.0
        by = getattr(node, "_saved_other", None)
        if isinstance(by, Tensor) and not by.dim() and is_here(by) and (value := number(by)) > 0:
            value = value if kind == "DivBackward0" else 1.0 / value
            if MOST_SCALED > value > 1.0:
                return value
        node = node.next_functions[0][0] if node is not None else None  # through a loss scale
    return 1.0


def _unscaled(tensor: Tensor, scaled: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
    if scaled is None:
        return tensor
    made, original, by = scaled
    # Divided for accumulation after scaling: take only the scale out again.
    return original if made is tensor else tensor.detach() / by.to(tensor.device)
