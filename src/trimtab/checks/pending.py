"""Follows each gradient from the backward pass that made it to the step that uses it, or to where it is lost."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trimtab.checks.events import Event, Gradients
from trimtab.sample.transfer import number


class Pending:
    """Which backward passes are in the gradients of each optimizer, and which of them a step has used already."""

    def __init__(self) -> None:
        self._params: dict[int, list[Tensor]] = {}
        self._old: dict[int, dict[int, int]] = {}  # by optimizer: parameter -> the gradient tensor left by its step
        self._holds: dict[int, list[int]] = {}  # by optimizer: the backward passes that its gradients are made of
        self._new: dict[int, int] = {}  # by optimizer: backward passes since its last step
        self._marks: dict[int, tuple[Any, ...]] = {}
        self._scaled: set[int] = set()
        self.backwards: list[Event] = []
        self.used: dict[int, set[int]] = {}  # by backward: the optimizers that stepped on it
        self.given: dict[int, set[int]] = {}  # by backward: the optimizers whose gradients it is in
        self._steps: list[tuple[int, int]] = []  # (number of backwards so far, optimizer)
        self._versions: dict[int, int] = {}  # by backward: how often weights had changed when it was over
        self._moved: set[int] = set()  # backwards after which weights moved without a step
        self._ids: dict[int, tuple[int, ...]] = {}
        self.by_hand = False
        self._used_up: dict[int, tuple[Any, ...]] = {}  # by optimizer: the gradients as its last step left them
        self._idle: set[int] = set()  # optimizers that stepped on no backward pass
        self._left: dict[int, tuple[Any, ...]] = {}  # by optimizer: the gradients as backward or clipping left them

    def know(self, optimizer: Any) -> None:
        """Follow this one, too."""
        if id(optimizer) not in self._params:
            self._holds[id(optimizer)] = []
            self._old[id(optimizer)] = {}
            self._new[id(optimizer)] = 0
        self._params[id(optimizer)] = [p for g in optimizer.param_groups for p in g["params"]]

    def before_backward(self, optimizers: Iterable[Any], event: Event) -> None:
        """Gradients are about to be added to what is there."""
        self._look_for_moves()
        for optimizer in optimizers:
            self._forget_cleared(id(optimizer))
            self._marks[id(optimizer)] = self._mark(id(optimizer))
        self.backwards.append(event)

    def after_backward(self, optimizers: Iterable[Any]) -> None:
        """Gradients were added: to whose?"""
        num = len(self.backwards) - 1
        for optimizer in optimizers:
            key = id(optimizer)
            if self._mark(key) != self._marks.get(key):
                self._holds[key].append(num)
                self._new[key] += 1
                self.given.setdefault(num, set()).add(key)
            self._ids[key] = tuple(id(p.grad) for p in self._params[key])
            self._left[key] = self._mark(key)
        self._versions[num] = self._num_changes()
        touched = {id(p) for o in optimizers for p in self._params[id(o)] if p.grad is not None}
        if self.backwards[num].facts.get("scaled"):
            self._scaled |= touched

    def before_step(self, optimizer: Any) -> Gradients:
        """What the step is about to use."""
        key = id(optimizer)
        self._forget_cleared(key)
        params = self._params[key]
        if self._holds[key] and self._ids.get(key) != tuple(id(p.grad) for p in params):
            self.by_hand |= any(p.grad is not None for p in params)
        norms = dict(zip([id(p) for p in params], _norms([p.grad for p in params]), strict=True))
        if not self._holds[key]:
            self._idle.add(key)
        for num in self._holds[key]:
            self.used.setdefault(num, set()).add(key)
        return Gradients(norms, len(self._old[key]) if self._new[key] else 0, self._served_another(key))

    def _served_another(self, key: int) -> int | None:
        """Another optimizer has stepped on one of these passes, and further passes came after that."""
        held = self._holds[key]
        for so_far, other in self._steps:
            before = [n for n in held if n < so_far]
            if other != key and len(before) < len(held) and any(other in self.used.get(n, ()) for n in before):
                return other
        return None

    def after_step(self, optimizer: Any) -> None:
        """The step is made: what is left in the gradients now is old."""
        key = id(optimizer)
        left = {id(p): id(p.grad) for p in self._params[key] if p.grad is not None and _any(p.grad)}
        self._old[key], self._new[key] = left, 0
        self._used_up[key] = self._mark(key)
        self._steps.append((len(self.backwards), key))
        if self._versions:
            self._versions[max(self._versions)] = self._num_changes()
        self._scaled -= {id(p) for p in self._params[key]}

    def discarded(self) -> list[int]:
        """Backward passes that gave gradients, which no step used before they were cleared."""
        held = {n for holds in self._holds.values() for n in holds}
        lost = [n for n in self.given if not self.used.get(n) and n not in held and n not in self._moved]
        # With several players a pass may be for the others; it is lost for one that then steps on nothing.
        return [n for n in lost if len(self._params) == 1 or self.given[n] & self._idle]

    def _look_for_moves(self) -> None:
        last = len(self.backwards) - 1
        if last >= 0 and last not in self.used and self._versions.get(last) != self._num_changes():
            self._moved.add(last)

    def _num_changes(self) -> int:
        return sum(p._version for params in self._params.values() for p in params)

    def made_of(self, optimizer: Any) -> list[int]:
        """The backward passes that its gradients are made of now."""
        return list(self._holds[id(optimizer)])

    def look(self) -> None:
        """Something is about to change the gradients: what was cleared before that?"""
        for key in self._params:
            self._forget_cleared(key)

    def clipped(self) -> None:
        """Gradients were changed, but not cleared."""
        for key in self._params:
            if self._holds[key]:
                self._left[key] = self._mark(key)

    def is_used_up(self, optimizer: Any) -> bool:
        """Whether these are the very gradients that its last step used, untouched."""
        return self._used_up.get(id(optimizer)) == self._mark(id(optimizer))

    def num_new(self, optimizer: Any) -> int:
        """How many backward passes there were since its last step."""
        return self._new[id(optimizer)]

    def unscaled(self, optimizer: Any) -> None:
        """The scale was taken out again."""
        self._scaled -= {id(p) for p in self._params.get(id(optimizer), ())}

    def is_scaled(self, params: set[int]) -> bool:
        """Whether the gradients of these parameters still hold the factor of a scaler."""
        return bool(self._scaled & params)

    def _forget_cleared(self, key: int) -> None:
        params = self._params[key]
        old = self._old[key]
        if old:
            self._old[key] = {
                id(p): old[id(p)]
                for p in params
                if id(p) in old and p.grad is not None and id(p.grad) == old[id(p)] and _any(p.grad)
            }
        if self._mark(key) == self._left.get(key):
            return  # nobody touched them: where they are zero, backward made them so
        if self._holds[key] and not any(p.grad is not None and _any(p.grad) for p in params):
            self._holds[key] = []
            self._scaled -= {id(p) for p in params}

    def _mark(self, key: int) -> tuple[Any, ...]:
        return tuple(None if p.grad is None else (id(p.grad), p.grad._version) for p in self._params[key])


def _any(grad: Tensor) -> bool:
    values = grad._values() if grad.layout is torch.sparse_coo else grad
    return values.numel() > 0 and bool((values != 0).any())


def _norms(grads: list[Tensor | None]) -> list[float | None]:
    out: list[float | None] = []
    for grad in grads:
        if grad is None or grad.is_meta:
            out.append(None)
        else:
            values = grad.detach().coalesce().values() if grad.layout is torch.sparse_coo else grad.detach()
            wide = values.abs().double() if values.is_complex() else values.double()
            out.append(number(torch.linalg.vector_norm(wide)) if wide.numel() else 0.0)
    return out
