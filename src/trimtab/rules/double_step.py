"""UPD003: the optimizer stepped twice on the same gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleStep:
    """The optimizer stepped twice on the same gradients.

    ## What it sees
    No backward pass came between this step and the one before, and the gradients are the very same ones, untouched.
    `persist` such steps among the last 20 are asked for.

    ## Why it matters
    Each gradient is applied twice: the learning rate is doubled, moments count everything double, schedules that
    count steps run ahead. Usually a framework and the loop both call `step`.

    ## What to try
    1. Remove one of the two `step` calls: with `guard.step(loss)` do not call `optimizer.step()` as well.
    2. In Lightning with manual optimization, and with Accelerate, see who steps.
    3. If a step was meant to be skipped for want of a batch, skip `optimizer.step()` too.
    """

    code: ClassVar[str] = "UPD003"
    name: ClassVar[str] = "double-step"
    needs: ClassVar[tuple[str, ...]] = ("same_gradients",)
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    persist: int = 2

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on repeated use of the same gradients."""
        if not window.scalar("same_gradients") or window.scalar("rejected"):
            return
        num = 1 + sum(1 for s in list(window.past)[-19:] if s.get("same_gradients"))
        if num < self.persist:
            return
        yield found(
            self,
            window,
            f"this step used the gradients of the step before once more, for the {num}. time within 20 steps: "
            "no backward pass came between them.",
            num_repeats=num,
        )
