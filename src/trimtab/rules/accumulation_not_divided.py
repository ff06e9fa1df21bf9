"""OPT006: several micro-batches are added up without dividing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationNotDivided:
    """Several micro-batches are added up without dividing.

    ## What it sees
    At least `least` backward passes make up a step (two may well be the two terms of one loss), and the loss of
    each came in with its full weight (found from the gradient at the logits of a mean cross-entropy, in the first
    such steps): their sum is `n` times the gradient of the mean. Gradients that are divided afterwards are noticed.

    ## Why it matters
    The gradient and with it the step is n times what a batch of the same size would give. With plain SGD the learning
    rate is n times too high; clipping hides it, and results depend on the number of micro-batches.

    ## What to try
    1. Where micro-batches differ in size, divide the gradients before the step by the number of samples or tokens.
    """

    code: ClassVar[str] = "OPT006"
    name: ClassVar[str] = "accumulation-not-divided"
    needs: ClassVar[tuple[str, ...]] = ("backwards",)
    hold: ClassVar[int] = 60
    severity: Severity = Severity.WARN
    least: int = 3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when n full losses are added up."""
        num, factor, handed = window.scalar("backwards"), window.scalar("loss_factor"), window.scalar("handed")
        if num is None or factor is None or handed is None or num < self.least:
            return
        scale = window.scalar("scale") or 1.0
        whole = factor / scale * handed
        if not 0.9 < whole < 1.1:
            return
        yield found(
            self,
            window,
            f"{int(num)} backward passes make up this step, and each loss came in undivided: the gradient is "
            f"{int(num)} times that of their mean.",
            num_backwards=num,
            factor=whole,
        )
