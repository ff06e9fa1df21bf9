"""EMA002: the averaged weights stand still while the model learns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class EmaNotMoving:
    """The averaged weights stand still while the model learns.

    ## What it sees
    The copy given as `ema=` has not changed by a bit for `persist` steps, while the weights did. An average that has
    not begun (SWA with a later start) stays silent.

    ## Why it matters
    What will be evaluated or shipped is an old or untrained model: an update that is never called, a decay of 1, an
    average of another copy of the model.

    ## What to try
    1. Call the update after each step: `ema.update_parameters(model)`.
    2. Check the decay: 1 never moves.
    3. Check that the average was made from this very model.
    """

    code: ClassVar[str] = "EMA002"
    name: ClassVar[str] = "ema-not-moving"
    needs: ClassVar[tuple[str, ...]] = ("ema_still", "ema_sum")
    hold: ClassVar[int] = 20
    severity: Severity = Severity.WARN
    persist: int = 16

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when an average stopped following."""
        still = window.scalar("ema_still")
        if still is None:  # on a device only a sum is known
            sums = window.last("ema_sum", self.persist + 1)
            still = float(self.persist) if len(sums) > self.persist and min(sums) == max(sums) else None
        if still is None or still < self.persist:
            return
        ratios = window.last("update_ratio", 8)
        if ratios and max(ratios) == 0:
            return
        yield found(
            self, window, f"the averaged weights have not changed for {int(still)} steps.", ("ema",), steps=still
        )
