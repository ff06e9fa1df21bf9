"""GRAD006: the gradient of the step before is still in this one: it was never zeroed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleGradient:
    """The gradient of the step before is still in this one: it was never zeroed.

    ## What it sees
    One weight is listened to: the gradient it has at the step must be what the backward passes of this step gave
    (scaled at most). Here it also contains what was left of the step before, in `persist` steps in a row.
    Accumulating several micro-batches into one step is told apart exactly.

    ## Why it matters
    Without `zero_grad` every step repeats all earlier gradients: the effective learning rate grows with every step,
    momentum is counted twice, and training wobbles or diverges after a good start.

    ## What to try
    1. Call `optimizer.zero_grad()` once per step, before the first backward pass of the next one.
    2. With gradient accumulation zero only after the step, not after each micro-batch, and always after it.
    3. If gradients are kept on purpose, ignore this rule: `ignore = ["GRAD006"]`.
    """

    code: ClassVar[str] = "GRAD006"
    name: ClassVar[str] = "stale-gradient"
    needs: ClassVar[tuple[str, ...]] = ("carried",)
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    share: float = 0.6
    most: float = 1.4
    persist: int = 3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when what was left is part of the gradient several times in a row."""
        if not (window.scalar("carried") or 0.0) >= self.share:
            return
        shares = window.last("carried", self.persist)
        if len(shares) < self.persist or min(shares) < self.share or max(shares) > self.most:
            return
        if any(s.get("same_gradients") for s in (window.now.scalars, *list(window.past)[-self.persist :])):
            return
        yield found(
            self,
            window,
            f"the gradient still contains {shares[-1]:.0%} of the one before it, {self.persist} steps in a row: "
            "it was not zeroed between the steps.",
            carried=shares[-1],
        )
