"""LOSS004: the loss has not moved from chance since the run began."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.screen import Bounds
from trimtab.core.stats.series import is_falling
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found

RECENT = 64
"""Steps in which a loss that falls is still learning: the way to chance comes first, and lies behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NotLearning:
    """The loss has not moved from chance since the run began.

    ## What it sees
    After as much effort as `effort` steps at the full learning rate, the level of the loss is still within `gain` of
    its first level or of what guessing by frequency gives. It needs a loss whose chance level is known (cross-entropy
    or squared error, with targets told through `batch`). Warm-up counts for little effort; plateaus below chance are
    no business of this rule, and a loss that falls beyond doubt is merely slow. Or, where the gradient at the output
    shows it, the loss of the answers alone is `worse` times that of blind guessing in `looks` looks, 20 steps apart.

    ## Why it matters
    Hours can pass in a run that looks alive: gradients flow, weights change, nothing is learned.

    ## What to try
    1. Check that the loss depends on the output: is the right tensor passed, is anything detached?
    """

    code: ClassVar[str] = "LOSS004"
    name: ClassVar[str] = "not-learning"
    needs: ClassVar[tuple[str, ...]] = ("chance", "answer_ratio")
    hold: ClassVar[int] = 50
    every: ClassVar[int] = 10
    severity: Severity = Severity.WARN
    effort: float = 80.0
    gain: float = 0.03
    moving: float = 3e-4
    slowly: float = 0.01
    worse: float = 1.25
    looks: int = 3

    def silent_while(self, window: Window) -> Bounds:
        """Of a run that was better than guessing once it is not said: that level never rises."""
        level = window.level("loss")
        least = max(level.sure, 0.0) / (1.0 - 2.0 * self.gain) * (1.0 + 1e-9)
        return {"chance": (least, math.inf), "answer_ratio": (-math.inf, self.worse)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a good deal of effort left the loss at chance, or the answers worse than that."""
        yield from self._worse(window)
        chance, level = window.scalar("chance"), window.level("loss")
        step = window.now.step
        if chance is None or window.schedule.effort < self.effort or window.now.layout.optimizer:
            return
        now = level.now
        if not now > chance * (1.0 - self.gain) - 1e-12 or level.sure < chance * (1.0 - 2.0 * self.gain):
            return
        if is_falling(window.history("loss").values()[-RECENT:], at_least=self.slowly * chance):
            return
        ratios = window.last("update_ratio", 32)
        ratio = sorted(ratios)[len(ratios) // 2] if ratios else None
        if ratio is not None and ratio > self.moving:
            return  # the weights move all the time: what to learn is missing, not the learning
        yield found(
            self,
            window,
            f"the loss is about {now:.4g} at step {step}; it was about {level.start:.4g} in the first steps, and "
            f"guessing gives {chance:.4g}.",
            ("loss",),
            loss=now,
            start=level.start,
            chance=chance,
            update_ratio=ratio,
        )

    def _worse(self, window: Window) -> Iterator[Finding]:
        ratio, known = window.scalar("answer_ratio"), window.last("answer_ratio", 64)[-self.looks :]
        if ratio is None or len(known) < self.looks or window.schedule.effort < self.effort:
            return
        if min(known) < self.worse or known[-1] < 0.8 * known[0]:
            return
        yield found(
            self,
            window,
            f"the answers are still worse than blind guesses at step {window.now.step}: their loss is {ratio:.3g} "
            "times that of giving every answer the same share.",
            ("output",),
            ratio=ratio,
        )
