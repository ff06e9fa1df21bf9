"""LOSS007: the validation loss is NaN or Inf while training goes on."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteValidation:
    """The validation loss is NaN or Inf while training goes on.

    ## What it sees
    The loss handed to `guard.validate` is not finite.

    ## Why it matters
    Training looks fine and the model that would be shipped is broken: usually the running statistics of a
    normalisation layer, which only evaluation uses, or one bad sample of the validation set.

    ## What to try
    1. Look at the running statistics of BatchNorm layers: a nonfinite-buffer under "What was found" in `trimtab
       report` names them.
    2. Evaluate the validation batches one by one: which one gives the NaN?
    3. Check divisions by the number of valid targets: a validation batch may have none.
    """

    code: ClassVar[str] = "LOSS007"
    name: ClassVar[str] = "nonfinite-validation"
    needs: ClassVar[tuple[str, ...]] = ("val_loss",)
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the newest validation loss is not finite."""
        loss = window.scalar("val_loss")
        if loss is None or math.isfinite(loss):
            return
        before, train = window.earlier("val_loss"), window.earlier("loss")
        known = [
            f"{name} {one.last:.4g}, at step {one.last_step}"
            for name, one in (("the last finite one was", before), ("the last finite training loss", train))
            if one.last_step >= 0
        ]
        yield found(
            self,
            window,
            f"the validation loss is {loss}{''.join(f'; {text}' for text in known)}.",
            ("val_loss",),
            val_loss=loss,
            last=before.last if before.last_step >= 0 else None,
            train_loss=train.last if train.last_step >= 0 else None,
        )
