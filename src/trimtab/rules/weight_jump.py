"""WGT003: one step moved the weights farther than any step before it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightJump:
    """One step moved the weights farther than any step before it.

    ## What it sees
    The update of this step, relative to the size of the weights, is at least `size`, `times` the largest ever seen,
    and far above the usual one. Updates that are not finite have rules of their own. The run must be `min_history`
    steps old.

    ## Why it matters
    Adaptive optimizers turn a burst after quiet gradients, or a jump of the rate, into a huge step. What was learned
    in that part of the network is gone.

    ## What to try
    1. Go back to a checkpoint from before this step.
    """

    code: ClassVar[str] = "WGT003"
    name: ClassVar[str] = "weight-jump"
    needs: ClassVar[tuple[str, ...]] = ("update_ratio",)
    calm: ClassVar[bool] = True
    hold: ClassVar[int] = 10
    severity: Severity = Severity.ERROR
    size: float = 0.1
    times: float = 3.0
    min_history: int = 10

    def silent_between(self) -> dict[str, tuple[float, float]]:
        """A smaller update is no jump."""
        return {"update_ratio": (-math.inf, self.size)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the newest update dwarfs all before."""
        ratio, history = window.scalar("update_ratio"), window.history("update_ratio")
        if ratio is None or len(history) < self.min_history or not self.size <= ratio < math.inf:
            return
        usual, highest = history.median(), history.highest
        if ratio < self.times * highest or ratio < 10.0 * usual:
            return
        before = window.earlier("update_ratio")
        yield found(
            self,
            window,
            f"this step changed the weights by {ratio:.4g} times their size ({before.range()}).",
            update_ratio=ratio,
            usual=before.usual,
            highest=before.highest,
        )
