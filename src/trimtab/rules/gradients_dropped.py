"""GRAD008: gradients are computed, and zeroed before any step uses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientsDropped:
    """Gradients are computed, and zeroed before any step uses them.

    ## What it sees
    One weight is listened to. Several backward passes added to its gradient since the last step, and in between it was
    zeroed, in `persist` looks in a row. Where the weight was moved in between (a sharpness-aware step, a line search),
    or another optimizer made a step, starting over is meant.

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
        """Fire when gradients were dropped several times in a row."""
        num = window.scalar("dropped")
        if not num or not window.streak("dropped", self.persist):
            return
        yield found(
            self,
            window,
            f"the gradients of {int(num)} backward passes since the last step were zeroed before this one: they were "
            "computed for nothing.",
            num_dropped=num,
        )
