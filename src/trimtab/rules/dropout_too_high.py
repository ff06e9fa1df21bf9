"""MODE003: dropout leaves nearly nothing of what a layer puts out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class DropoutTooHigh:
    """Dropout leaves nearly nothing of what a layer puts out.

    ## What it sees
    A dropout layer, an attention or a recurrent layer drops `share` or more of its values while the model trains. A
    call of `torch.nn.functional.dropout` cannot be seen.

    ## Why it matters
    Usual values are 0.1 to 0.5. At 0.9 a value that is left is multiplied by 10, and most samples reach the next layer
    as noise. Often the share to keep was given where PyTorch takes the share to drop.

    ## What to try
    1. Check what is meant: `p` is the probability of dropping a value, not of keeping it.
    """

    code: ClassVar[str] = "MODE003"
    name: ClassVar[str] = "dropout-too-high"
    needs: ClassVar[tuple[str, ...]] = ("dropout",)
    hold: ClassVar[int] = 60
    severity: Severity = Severity.WARN
    share: float = 0.9

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on a share that no recipe has."""
        share, names = window.scalar("dropout"), window.now.notes.get("dropout", ())
        if share is None or share < self.share:
            return
        yield found(
            self,
            window,
            f"dropout takes away {share:.0%} of the values (usually 10 to 50 %) in {listed(names) or 'the model'}.",
            names,
            share=share,
        )
