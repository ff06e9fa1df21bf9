"""Backward passes without a step: a loop that trains nothing, which no hook of an optimizer can tell of.

A GradScaler that nobody told us of and that skips every update, an optimizer that is never stepped, a wrapper that
swallows the call: the model is called in training mode, gradients are computed, and thrown away for the next ones.
It can begin in the middle of a run: a condition that is never true again, an early return.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from trimtab.core.contain import Contained
from trimtab.sample.probes.sentinel import Sentinel

WAIT, WAIT_LATER = 8, 32
"""Forwards before the first step until backward passes are counted: nearly every loop has stepped by then. And those
after a step: at least so many, and twice as many as ever lay between two steps."""
LIMIT = 50
"""Backward passes whose gradients were thrown away, and not one step meanwhile: this is said."""
LEAST = 4
"""The same where the run is over: a look at the gradients before training throws away one or two."""
NUM_WATCHED = 3


class UnsteppedPasses:
    """Counts backward passes without a step; those that add to what is there are an accumulation and meant.

    `params` are those that an optimizer should move; `say` is called once, with how many there were. A step of any
    optimizer in this process counts: of two models that train in turns one gets gradients that nobody uses.
    """

    def __init__(self, params: Sequence[Tensor], say: Callable[[int], None], contained: Contained) -> None:
        able: list[Any] = [p for p in params if p.requires_grad and p.is_leaf]
        self._watched = able[:: max(1, (len(able) + NUM_WATCHED - 1) // NUM_WATCHED)]
        self._say, self._contained = say, contained
        self._handles: list[Any] = []
        self._versions: dict[int, int] = {}
        self._thrown: dict[int, int] = {}
        self._num_steps = 0  # of all optimizers, when counting began
        self._num = 0
        self._stepped = False
        self.over = not self._watched
        self.wait = WAIT
        """Forwards after a step from which on `forward` has to be called."""
        self.counts = False

    def forward(self, num: int) -> None:
        """The model is called in training mode, for the `num`-th time since the last step, which is `wait` or more."""
        if self.over:
            return
        if self.counts and self._num_steps != Sentinel.num_steps:
            self._restart()
        if not self.counts:
            self.counts, self._num_steps = True, Sentinel.num_steps
        self._num = num
        if not self._handles:
            heard = self._contained.hook("counting backward passes", self._backward)
            able = [p for p in self._watched if p.requires_grad]  # others were frozen since
            self._handles = [p.register_post_accumulate_grad_hook(heard) for p in able]
        for p in self._watched:
            grad = p.grad
            if grad is not None and grad.device.type == "cpu" and not grad.is_sparse and not grad.any():
                self._versions[id(p)] = grad._version + 2  # zeroed in place: what is added next is new
        if self.num_thrown >= LIMIT:
            self.finish()

    def _backward(self, param: Tensor) -> None:
        if param.grad is None:
            return
        key, version = id(param), param.grad._version
        # Adding to a gradient counts its version up; one that was thrown away is a new tensor, and begins at 0.
        self._thrown[key] = self._thrown.get(key, 0) + (version <= self._versions.get(key, -1))
        self._versions[key] = version

    @property
    def num_thrown(self) -> int:
        """Backward passes so far whose gradients took the place of others that no step has used."""
        return max(self._thrown.values(), default=0)

    def step_done(self) -> None:
        """A step was made: begin again, later than before if there were many forwards before it."""
        self._stepped = True
        self.wait = max(self.wait, WAIT_LATER)
        if self.counts:
            self._restart()

    def _restart(self) -> None:
        self.wait, self.counts = max(self.wait, 2 * self._num), False
        self._versions.clear()
        self._thrown.clear()
        self._take_off()

    def finish(self, least: int = LIMIT) -> None:
        """Say what is known, if it is enough, and look no further."""
        if not self.over and self.num_thrown >= (LIMIT if self._stepped else least):
            self.remove()
            self._say(self.num_thrown)

    def remove(self) -> None:
        """It was said, or the guard leaves: there is nothing more to count."""
        self.over = True
        self._take_off()

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
