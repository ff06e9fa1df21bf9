"""ACT005: linear layers follow each other with no activation in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationMissing:
    """Linear layers follow each other with no activation in between.

    ## What it sees
    The graph of the first losses: three or more linear layers stand right behind each other. A narrow layer between two
    wide ones (a low-rank adapter, a linear autoencoder) is meant and does not count, and neither do layers with a norm
    or a dropout between them.

    ## Why it matters
    Linear layers in a row do what a single one could do: the model can only draw straight lines, however deep it is. It
    learns what a linear model learns, and stops there.

    ## What to try
    1. Put an activation (ReLU, GELU, tanh) behind each layer but the last.
    2. If it is meant, ignore this rule: `ignore = ["ACT005"]`.
    """

    code: ClassVar[str] = "ACT005"
    name: ClassVar[str] = "activation-missing"
    needs: ClassVar[tuple[str, ...]] = ("linear_chain",)
    hold: ClassVar[int] = 1000
    severity: Severity = Severity.WARN

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the graph shows it."""
        num = window.scalar("linear_chain")
        if not num:
            return
        yield found(
            self,
            window,
            f"{num:.0f} linear layers follow each other with no activation in between: one layer could do the same.",
            ("layers",),
            num_layers=num,
        )
