"""GRAD008: gradients of several backward passes are computed, and all but the last are thrown away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsDropped:
    """Gradients of several backward passes are computed for a step, and all but the last are thrown away.

    ## What it sees
    One weight is listened to. Several backward passes brought it a gradient since the last step, and at the step it
    holds the last of them alone, in `persist` looks in a row. Where the weight was moved in between (a sharpness-aware
    step, a line search), or another optimizer made a step, beginning anew is meant.

    ## Why it matters
    `zero_grad` inside an accumulation, or a step that is made only now and then: the batches in between are computed
    for nothing, and the run learns as if they did not exist.

    ## What to try
    1. Call `zero_grad` right after the step only, not before each micro-batch.
    2. Make a step for every backward pass, or divide the loss and let the gradients add up.
    """

    code: ClassVar[str] = "GRAD008"
    name: ClassVar[str] = "gradients-dropped"
    needs: ClassVar[tuple[str, ...]] = ("dropped",)
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    persist: int = 3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when only the last gradient is left several times in a row."""
        num = window.scalar("dropped")
        if not num or not window.streak("dropped", self.persist):
            return
        yield found(
            self,
            window,
            f"{int(num) + 1} backward passes were made since the last step, and the gradient is that of the last one: "
            f"{int(num)} of them were for nothing.",
            num_dropped=num,
        )
