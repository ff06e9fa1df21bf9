"""LOSS005: the loss swings up and down without getting better, and gradients flip with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.screen import Bounds
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class OscillatingLoss:
    """The loss swings up and down without getting better, and gradients flip with it.

    ## What it sees
    In the last `span` steps successive gradients of one weight point in opposite directions (median cosine below
    `turn`), and the loss is no lower than it was before. Losses that alternate by design (two tasks in turn) do not
    flip gradients.

    ## Why it matters
    The step overshoots the valley each time. The learning rate or the momentum is too high for this part of the loss
    surface; a little more and it diverges.

    ## What to try
    1. Decay the learning rate earlier.
    2. Do not count on a larger batch: it makes gradients less noisy but does not cure this.
    """

    code: ClassVar[str] = "LOSS005"
    name: ClassVar[str] = "oscillating-loss"
    needs: ClassVar[tuple[str, ...]] = ("grad_cos",)
    hold: ClassVar[int] = 20
    every: ClassVar[int] = 4
    severity: Severity = Severity.WARN
    turn: float = -0.4
    span: int = 24
    looks: int = 12

    def silent_while(self, window: Window) -> Bounds:
        """Gradients that do not point against the last ones are no turn."""
        return {"grad_cos": (self.turn, math.inf)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when gradients flip persistently and nothing is gained."""
        if (window.scalar("grad_cos") or 0.0) > self.turn:
            return
        turns = window.last("grad_cos", 64)[-self.looks :]
        if len(turns) < self.looks or window.now.layout.optimizer:
            return
        flips = sum(t < self.turn for t in turns)
        level = window.level("loss")
        losses = window.last("loss", self.span)
        if flips < self.looks - 1 or len(losses) < self.span:
            return
        half = self.span // 2
        first, second = sorted(losses[:half])[half // 2], sorted(losses[half:])[half // 2]
        swing = max(losses) - min(losses)
        better = first - second > 0.1 * swing
        if better or level.now < level.best + 0.1 * abs(level.start - level.best) or swing < 0.1 * abs(level.now):
            return
        yield found(
            self,
            window,
            f"the loss swings between {min(losses):.4g} and {max(losses):.4g}; successive gradients point against each "
            f"other (median cosine {sorted(turns)[len(turns) // 2]:.2f}), and its best level was about "
            f"{level.best:.4g}.",
            ("loss",),
            cosine=sorted(turns)[len(turns) // 2],
            lowest=min(losses),
            highest=max(losses),
        )
