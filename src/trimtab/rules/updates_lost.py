"""AMP005: most updates are too small for the precision of the weights, and are rounded away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatesLost:
    """Most updates are too small for the precision of the weights, and are rounded away.

    ## What it sees
    In `looks` looks in a row, 20 steps apart, more than `share` of the float16 or bfloat16 weights that have a gradient
    are bit for bit the same after a step that changed some of them. Or more than `share` of the float32 weights hold no
    more digits than float16 or bfloat16 can, although steps move them: something rounds them in between.

    ## Why it matters
    bfloat16 keeps three digits: an update below 0.2 % of a weight changes nothing. At the rates of fine-tuning nearly
    all updates are lost, step after step; the loss falls a little, through the smallest weights, and stops.

    ## What to try
    1. Keep the weights in float32 and run the forward under `torch.autocast`.
    2. Or keep a float32 copy for the optimizer, use stochastic rounding, or train float32 adapters (LoRA) only.
    """

    code: ClassVar[str] = "AMP005"
    name: ClassVar[str] = "updates-lost"
    needs: ClassVar[tuple[str, ...]] = ("rounded_away", "coarse_weights")
    hold: ClassVar[int] = 60
    severity: Severity = Severity.WARN
    share: float = 0.95
    looks: int = 3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when it lasts."""
        yield from self._rounded(window)
        lost = window.last("rounded_away", 64)[-self.looks :]
        if window.scalar("rounded_away") is None or len(lost) < self.looks or min(lost) <= self.share:
            return
        if any(s.get("rejected") or s.get("scaler_skipped") for s in (*window.past, window.now.scalars)):
            return
        yield found(
            self,
            window,
            f"{lost[-1]:.1%} of the weights with a gradient did not change in this step: their updates are smaller "
            "than what their precision can hold.",
            ("weights",),
            share=lost[-1],
        )

    def _rounded(self, window: Window) -> Iterator[Finding]:
        share, known = window.scalar("coarse_weights"), window.last("coarse_weights", 64)[-self.looks :]
        if share is None or len(known) < self.looks or min(known) <= self.share:
            return
        if not all(window.last("update_ratio", 2 * self.looks)):
            return  # they are what they were loaded as
        yield found(
            self,
            window,
            f"{share:.1%} of the float32 weights hold no more digits than 16 bits can: something rounds them between "
            "the steps, and small updates are lost.",
            ("weights",),
            share=share,
        )
