"""LOSS001: the loss is NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, of_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteLoss:
    """The training loss is NaN or Inf.

    ## What it sees
    The loss handed to `guard.step(loss)` or `guard.observe(loss=...)` is NaN, +Inf or -Inf, in any micro-batch of the
    step.

    ## Why it matters
    Its gradient is usually NaN as well, and one such update ends the run: every weight and every optimizer moment it
    touches stays NaN. A NaN loss with clean gradients (an empty batch, all targets ignored) does no harm to
    the weights, but hides what the model is learning.

    ## What to try
    1. Look at the targets of this step: an empty batch, all labels ignored, NaN among them.
    """

    code: ClassVar[str] = "LOSS001"
    name: ClassVar[str] = "nonfinite-loss"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the newest loss is not finite."""
        loss = window.scalar("loss")
        if loss is None or math.isfinite(loss):
            return
        before, ranks = window.earlier("loss"), window.now.notes.get("loss_ranks", ())
        last = (
            f"; the last finite loss was {before.last:.4g}, at step {before.last_step}" if before.last_step >= 0 else ""
        )
        kept = " The update was kept out of the weights." if window.scalar("rejected") else ""
        yield Finding(
            code=self.code,
            name=self.name,
            step=window.now.step,
            severity=self.severity,
            message=f"the loss is {loss}{of_ranks(ranks)}{last}.{kept}",
            subject=("loss", *ranks),
            evidence={
                "loss": loss,
                **({"last": before.last, "last_step": float(before.last_step)} if last else {}),
            },
        )
