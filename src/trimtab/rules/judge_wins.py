"""LOSS013: in an adversarial game the judge is always right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeWins:
    """In an adversarial game the judge is always right: the other side has nothing to learn from.

    ## What it sees
    One of several optimizers trains a model that is asked about samples that should all get yes, and about others that
    should all get no. Its loss on both has been below 0.005 in `looks` looks in a row, 20 steps apart.

    ## Why it matters
    A discriminator that is sure of every sample gives the generator no direction. Its own loss looks perfect, while the
    generated samples stop getting better.

    ## What to try
    1. Slow the judge down: a lower learning rate, fewer steps for each step of the other side, or a smaller model.
    2. Make its task harder: label smoothing, noise on its inputs, a gradient penalty or spectral normalisation.
    """

    code: ClassVar[str] = "LOSS013"
    name: ClassVar[str] = "judge-wins"
    needs: ClassVar[tuple[str, ...]] = ("judge_sure",)
    hold: ClassVar[int] = 100
    severity: Severity = Severity.WARN
    looks: int = 10

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when it lasts, where another optimizer trains as well."""
        looks = window.scalar("judge_sure") or 0.0
        if looks < self.looks or not (window.now.layout.optimizer or any(window.last("moving", 8))):
            return
        yield found(
            self,
            window,
            f"in the last {looks:.0f} looks, 20 steps apart, this model told true samples from made ones without an "
            "error: the other side gets no direction from it.",
            ("loss",),
            looks=looks,
        )
