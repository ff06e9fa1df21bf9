"""OPT004: the optimizer remembers NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteOptimizerState:
    """The optimizer remembers NaN or Inf.

    ## What it sees
    Part of the moments of every parameter is compared after each step. A non-finite value among them is named.

    ## Why it matters
    A moment that is NaN stays NaN, and every update computed from it is NaN: skipping steps does not help.

    ## What to try
    1. Go back to the last good checkpoint, with its optimizer state.
    2. If the weights are still sound, build a new optimizer and warm the learning rate up again.
    """

    code: ClassVar[str] = "OPT004"
    name: ClassVar[str] = "nonfinite-optimizer-state"
    needs: ClassVar[tuple[str, ...]] = ("state_bad",)
    hold: ClassVar[int] = 10
    severity: Severity = Severity.FATAL

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on non-finite moments."""
        num = window.scalar("state_bad")
        if num:
            names = window.now.notes.get("state_bad", ())
            yield found(
                self,
                window,
                f"{int(num)} or more values of the optimizer's state are NaN or Inf: {listed(names)}.",
                names,
                num=num,
            )
