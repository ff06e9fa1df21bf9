"""WGT005: two weights that were one are two now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class UntiedWeights:
    """Two weights that were one are two now.

    ## What it sees
    Parameters that were the same object when the guard was attached no longer are; or an embedding and an output
    layer hold equal values in different memory from the start, which random initialisation never gives.

    ## Why it matters
    Tied weights share what they learn and count once. After the tie breaks (by assigning a new parameter, a copy, or
    a `.to()` in the wrong place) each goes its own way, and one of them may not be in the optimizer at all.

    ## What to try
    1. Tie again after the model is complete, on its device, and before the optimizer is built: `head.weight =
       embed.weight`.
    2. Look for code that assigns a new Parameter or deep-copies part of the model.
    3. If they are meant to be separate, initialise them separately.
    """

    code: ClassVar[str] = "WGT005"
    name: ClassVar[str] = "untied-weights"
    needs: ClassVar[tuple[str, ...]] = ("untied",)
    hold: ClassVar[int] = 60
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on a broken tie."""
        num = window.scalar("untied")
        if num:
            pairs = window.now.notes.get("untied", ())
            yield found(self, window, f"no longer tied: {listed(pairs, num)}.", pairs, num_ties=num)
