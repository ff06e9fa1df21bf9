"""LOSS010: probabilities are given to a loss that takes logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class SoftmaxTwice:
    """The output is normalised by the model, and by the loss a second time.

    ## What it sees
    The output of the model is made of probabilities (rows that add up to 1, or single values between 0 and 1 that use
    all of that range), and the gradient that comes back to it is that of a cross-entropy that takes logits, in `looks`
    looks. Or the graph of the loss shows a softmax or sigmoid right in front of what normalises.

    ## Why it matters
    A softmax over values between 0 and 1 is nearly flat: the loss cannot come near 0, gradients are small, and the
    model learns slowly and badly without any error.

    ## What to try
    1. Take the softmax or sigmoid out of the model: `cross_entropy` and `binary_cross_entropy_with_logits` apply it.
    2. If the model must give probabilities, use `nll_loss` on their logarithms, or `binary_cross_entropy`.
    """

    code: ClassVar[str] = "LOSS010"
    name: ClassVar[str] = "softmax-twice"
    needs: ClassVar[tuple[str, ...]] = ("normalised_twice",)
    hold: ClassVar[int] = 100
    severity: Severity = Severity.ERROR
    looks: int = 2

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when it was seen more than once."""
        if not window.scalar("normalised_twice") or len(window.last("normalised_twice", 64)) < self.looks:
            return
        yield found(
            self,
            window,
            "the model gives probabilities, and the loss takes them for logits: they are normalised twice.",
            ("output",),
        )
