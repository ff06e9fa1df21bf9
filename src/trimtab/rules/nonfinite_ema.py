"""EMA001: the averaged weights hold NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteEma:
    """The averaged weights hold NaN or Inf.

    ## What it sees
    The copy given as `ema=` is compared each step; a non-finite value in it is named.

    ## Why it matters
    An average never forgets a NaN: from here on every evaluation and every checkpoint of the average is broken, while
    the trained weights may be sound.

    ## What to try
    1. Copy the trained weights into the average again, if they are sound.
    2. Do not update the average after a rejected step.
    3. Check the average before saving it.
    """

    code: ClassVar[str] = "EMA001"
    name: ClassVar[str] = "nonfinite-ema"
    needs: ClassVar[tuple[str, ...]] = ("ema_bad", "ema_sum")
    hold: ClassVar[int] = 10
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on non-finite averages."""
        num, total = window.scalar("ema_bad"), window.scalar("ema_sum")
        if total is not None and not math.isfinite(total):
            num = 1.0
        if num:
            names = window.now.notes.get("ema_bad", ())
            yield found(self, window, f"the averaged weights hold NaN or Inf: {listed(names)}.", names, num=num)
