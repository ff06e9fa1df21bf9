"""LOSS002: the loss jumps above everything the run has seen lately, and above where it started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.harm import is_fixed_objective, one_step_did_harm
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpike:
    """The loss jumps far above its recent history and above the level the run started from.

    ## What it sees
    The loss is at least `z` robust deviations above its recent median, exceeds the recent maximum by more than
    `reach` times the recent range, and lies clearly above the initial level. Small batches and rare hard samples make
    a healthy loss noisy; they stay below at least one of these three.

    ## Why it matters
    A loss worse than that of the untrained model means that the last updates destroyed what was learned. Spikes often
    come a few steps before divergence.

    ## What to try
    1. Go back to a checkpoint from before the spike and skip the data around it.
    """

    code: ClassVar[str] = "LOSS002"
    name: ClassVar[str] = "loss-spike"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    hold: ClassVar[int] = 10
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR
    z: float = 10.0
    reach: float = 4.0
    min_history: int = 30

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the newest loss is above its recent range, its usual level and its initial level at once."""
        loss = window.scalar("loss")
        history = window.history("loss")
        if loss is None or not math.isfinite(loss) or len(history) < self.min_history:
            return
        highest, initial = history.recent_max, history.initial
        if loss <= highest:  # cheap test first: the others sort the history
            return
        median = history.median()
        spread = max(highest - median, abs(initial - median), 1e-3 * abs(median))
        if loss <= highest + self.reach * spread or loss <= initial + 0.5 * spread:
            return
        if loss <= _tail(history.values()) ** 2.0 * max(window.level("loss").now, 0.0):
            return  # a series with a heavy tail: one step farther out is no news
        z = history.z(loss)
        if z < self.z or not (is_fixed_objective(window) or one_step_did_harm(window)):
            return
        before = window.earlier("loss")
        yield Finding(
            code=self.code,
            name=self.name,
            step=window.now.step,
            severity=self.severity,
            message=f"the loss is {loss:.4g} ({before.range()}; {before.first:.4g} at step {before.first_step}).",
            subject=("loss",),
            evidence={"loss": loss, "usual": before.usual, "highest": before.highest, "first": before.first, "z": z},
        )


def _tail(values: list[float]) -> float:
    """How far isolated values stand above their neighbours; 1 where none does, as in a series that falls.

    The second most isolated one is asked: a single hard sample is no tail.
    """
    ratios = sorted(v / max(a, b) for a, v, b in zip(values, values[1:], values[2:], strict=False) if max(a, b) > 0)
    return ratios[-2] if len(ratios) > 1 else 1.0
