"""LOSS009: the first answers are sure, and wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsOutOfRange:
    """The first answers are sure, and wrong: logits are far too large.

    ## What it sees
    In the first steps the cross-entropy of the answers is more than `times` that of giving every answer the same
    share, in `looks` looks, or three times that in one. It is read off the output and its gradient, so what else is
    added to the loss does not count. Where a step has replaced the weights meanwhile, it stays silent.

    ## Why it matters
    A model that knows nothing should say so. Logits that are far too large at the start come from a bad
    initialisation, inputs that were not normalised, a missing scale, or labels that mean something else; the first
    steps are spent on shrinking them, and much of the model may be ruined by that.

    ## What to try
    1. Print the inputs' mean and deviation: about 0 and 1 is what initialisations are made for.
    2. Initialise the last layer with small weights.
    3. Of a model that was trained before, check that classes and tokens still have the numbers they had.
    """

    code: ClassVar[str] = "LOSS009"
    name: ClassVar[str] = "logits-out-of-range"
    needs: ClassVar[tuple[str, ...]] = ("answer_ratio",)
    calm: ClassVar[bool] = True
    hold: ClassVar[int] = 100
    severity: Severity = Severity.WARN
    times: float = 4.0
    looks: int = 2
    first: int = 10
    thrown: float = 0.1

    def silent_between(self) -> dict[str, tuple[float, float]]:
        """Answers that are not far worse than guesses."""
        return {"answer_ratio": (-math.inf, self.times)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on answers that are sure and wrong from the start."""
        ratio, known = window.scalar("answer_ratio"), window.last("answer_ratio", self.first)
        if ratio is None or window.now.step >= self.first or min(known) < self.times:
            return
        if max(window.last("update_ratio", self.first), default=0.0) > self.thrown:
            return  # it did not begin so: a step did it
        if len(known) < self.looks and ratio < 3.0 * self.times:
            return
        yield found(
            self,
            window,
            f"in the first steps the loss of the answers is {ratio:.3g} times that of blind guesses.",
            ("output",),
            ratio=ratio,
        )
