"""DIST003: one process keeps all others waiting."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """One process keeps all others waiting.

    ## What it sees
    Over the last 32 steps one rank begins its forward pass later than the others, counted from the end of the step
    before: by `share` of a whole step, and at least `least_s` seconds. Once in a while (an epoch's validation, a
    checkpoint) does not count. Time lost inside the forward or backward pass is not seen: all ranks wait in it alike.

    ## Why it matters
    Processes average their gradients in every step, so the slowest one sets the pace of all: what one rank loses, every
    GPU of the run loses.

    ## What to try
    1. Look at what that rank does between two steps: data loading, logging, saving, printing a loss (`.item()` waits).
    2. Give its loader more workers, and compare its disk, network and CPU load with another rank's.
    3. If it is rank 0, move logging and evaluation out of the loop, or do them less often.
    """

    code: ClassVar[str] = "DIST003"
    name: ClassVar[str] = "straggler"
    needs: ClassVar[tuple[str, ...]] = ("rank_late_share",)
    hold: ClassVar[int] = 200
    severity: Severity = Severity.WARN
    share: float = 0.2
    least_s: float = 0.01

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire where the rest of a step is spent waiting."""
        late, share = window.scalar("rank_late"), window.scalar("rank_late_share")
        if late is None or share is None or late < self.least_s or share < self.share:
            return
        ranks = window.now.notes.get("rank_late", ())
        who = ranks[0] if ranks else "one rank"
        message = f"{who} begins every step {late * 1e3:.3g} ms after the others, {100 * share:.0f} % of a step"
        yield found(self, window, f"{message} (medians of 32 steps).", ranks, late_s=late, share=share)
