"""OPT008: weight decay pulls the weights to zero, against the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class DecayTooHigh:
    """Weight decay pulls the weights to zero, against the gradient.

    ## What it sees
    Between two thorough looks the weights have shrunk to less than `left` of their size, and decay is what does it:
    it takes away `rate` of every weight in a step, or its pull is `times` the gradient. Where a run has found its
    balance, the gradient is at least as large as that pull.

    ## Why it matters
    A weight that decays by 1 % per step is gone in 100 steps unless the loss puts it back at every step. What is left
    of the model fits only what the strongest gradients say; often it answers every input with the mean.

    ## What to try
    1. Lower weight_decay: usual values are 0.01 to 0.1 for AdamW and 1e-4 for SGD and Adam.
    2. Multiply it by the learning rate before you compare recipes: decay per step is what counts, and a rate that was
       raised raises it as well.
    """

    code: ClassVar[str] = "OPT008"
    name: ClassVar[str] = "decay-too-high"
    needs: ClassVar[tuple[str, ...]] = ("decay_rate", "decay_pull")
    hold: ClassVar[int] = 120
    severity: Severity = Severity.WARN
    rate: float = 5e-3
    times: float = 3.0
    left: float = 0.85

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when decay is strong and the weights follow it."""
        size, norm = window.scalar("weight_norm"), window.level("grad_norm").now
        before = next((s["weight_norm"] for s in window.past if "weight_norm" in s), None)
        if size is None or before is None or not 0 < size < self.left * before:
            return
        rate, factor = window.scalar("decay_rate") or 0.0, window.scalar("decay_pull") or 0.0
        pull = factor * before / norm if norm > 0 else 0.0  # as it was before the weights gave way
        if rate < self.rate and pull < self.times:
            return
        why = f"it takes {rate:.2%} of each weight in a step" if rate >= self.rate else f"it pulls {pull:.3g} times as "
        yield found(
            self,
            window,
            f"the weights have shrunk from {before:.4g} to {size:.4g} within {len(window.past)} steps, and weight "
            f"decay does it: {why}{'' if rate >= self.rate else 'hard as the loss does'}.",
            ("weight_decay",),
            weight_norm=size,
            before=before,
            decay_rate=rate or None,
            pull=pull or None,
        )
