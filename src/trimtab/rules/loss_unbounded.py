"""LOSS008: the loss falls without end, far below zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from trimtab.core.screen import Bounds
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found

HALF = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class LossUnbounded:
    """The loss falls without end, far below zero.

    ## What it sees
    The loss is negative, more than `far` times as far from zero as it began, and the last 32 steps took it down by as
    much as the 32 before or more: it has no floor. A likelihood of continuous values may well be negative, but it
    settles. With several optimizers (games of two models) it stays silent.

    ## Why it matters
    Something in the loss can be lowered endlessly without learning anything: a regulariser with the wrong sign, a
    learned weight of a loss term, a variance that goes to zero. What the model should learn counts for nothing
    beside it, and the run ends in Inf.

    ## What to try
    1. Log the terms of the loss one by one: which of them falls?
    2. Check the sign of every penalty, and give a floor to learned variances and loss weights.
    """

    code: ClassVar[str] = "LOSS008"
    name: ClassVar[str] = "loss-unbounded"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    hold: ClassVar[int] = 50
    every: ClassVar[int] = 5
    severity: Severity = Severity.ERROR
    far: float = 20.0
    no_less: float = 0.9

    def _limit(self, window: Window) -> float:
        start = window.level("loss").start
        return -self.far * (abs(start) + 1.0) if math.isfinite(start) else -math.inf

    def silent_while(self, window: Window) -> Bounds:
        """Above this the loss is not far below zero."""
        return {"loss": (self._limit(window), math.inf)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a loss far below zero falls no more slowly than before."""
        loss = window.scalar("loss")
        if loss is None or not -math.inf < loss < self._limit(window) or window.now.layout.optimizer:
            return
        losses = window.last("loss", 2 * HALF)
        if len(losses) < 2 * HALF:
            return
        first, middle, last = (median(losses[i : i + 9]) for i in (0, HALF - 5, 2 * HALF - 9))
        fallen, before = middle - last, first - middle
        if not (fallen > 0 and before > 0 and fallen >= self.no_less * before):
            return
        start = window.level("loss").start
        yield found(
            self,
            window,
            f"the loss has fallen to {loss:.4g} from about {start:.4g} in the first steps, and goes on falling: "
            f"by {before:.3g} and then {fallen:.3g} in the last two times 32 steps. It has no floor.",
            ("loss",),
            loss=loss,
            start=start,
            fallen=fallen,
            fallen_before=before,
        )
