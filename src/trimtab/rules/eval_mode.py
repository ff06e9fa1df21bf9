"""MODE001: training goes on in evaluation mode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMode:
    """Training goes on in evaluation mode.

    ## What it sees
    In `persist` steps in a row the model was called for training (gradients on) while it and all of its dropout and
    batch-norm layers were in evaluation mode. Or the model trains and a part of it does not: a dropout that was on
    before is off, or a BatchNorm that is trained has never seen a batch. A model without such layers, and single layers
    kept in eval mode on purpose, stay silent.

    ## Why it matters
    Dropout is off and BatchNorm uses stale statistics that no longer follow the data. It happens after a validation
    without `model.train()`; the training loss even looks better for a while.

    ## What to try
    1. Call `model.train()` after every validation.
    2. If it is meant (fine-tuning with frozen statistics), put only those layers in eval mode, or ignore this rule.
    """

    code: ClassVar[str] = "MODE001"
    name: ClassVar[str] = "eval-mode"
    needs: ClassVar[tuple[str, ...]] = ("eval_forward", "eval_parts")
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    persist: int = 3
    looks: int = 2

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when training forwards run in eval mode."""
        num = window.scalar("eval_parts")
        if num and len(window.last("eval_parts", 64)) >= self.looks:
            names = window.now.notes.get("eval_parts", ())
            yield found(
                self,
                window,
                f"{int(num)} layers are in evaluation mode, and the model around them trains: {listed(names, num)}.",
                names,
                num_layers=num,
            )
        elif window.streak("eval_forward", self.persist):
            yield found(
                self,
                window,
                f"the model has been in evaluation mode for the last {self.persist} training steps.",
                ("model.training",),
            )
