"""UPD002: steps are made, and no weight changes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from trimtab.core.schedule import rates_of
from trimtab.core.screen import Bounds
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found

NEVER_STEPPED = (
    "With a GradScaler: print `scaler.get_scale()` at every step, and hand it to the guard (`scaler=scaler`).",
    "Without one: check that the loop calls `step()` of the optimizer that the guard was given.",
)

WRITTEN_BACK = (
    "Look for code after `step()` that writes to the parameters: an average (EMA) copied the wrong way round, a "
    "`load_state_dict` or `copy_` in the loop, rounding to a grid that is coarser than the updates.",
    "An average is made by `average.lerp_(weight, 1 - decay)`: the weight itself must not change.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUnchanged:
    """Steps are made, and no weight changes.

    ## What it sees
    For `persist` accepted steps in a row not one of the compared weights changed by a single bit, although there are
    gradients and the learning rate is not 0. A rate that is being warmed up gets more time. Or gradients are computed
    and thrown away again and again, and no step is made: not one ever, or none any more. Or every step moves the
    weights, something writes to them before the next one, and after `put_back` steps they are where they were, to
    within half of one such write.

    ## Why it matters
    The optimizer holds other tensors than the model uses, updates are lost to rounding (a tiny rate on bfloat16
    weights), or something puts the old weights back after each step.

    ## What to try
    1. Build the optimizer after the model is complete, on its device.
    2. Look for code that restores weights after the step.
    """

    code: ClassVar[str] = "UPD002"
    name: ClassVar[str] = "weights-unchanged"
    needs: ClassVar[tuple[str, ...]] = ("update_ratio", "passes_without_step", "put_back")
    calm: ClassVar[bool] = True
    wakes: ClassVar[Mapping[str, Bounds | None]] = {"put_back": None}
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    persist: int = 3
    warm: int = 200
    put_back: int = 60

    def silent_between(self) -> dict[str, tuple[float, float]]:
        """Any update that is not 0 is a change."""
        return {"update_ratio": (0.0, math.inf)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when accepted steps leave everything as it was."""
        if (passes := window.scalar("passes_without_step")) is not None:
            finding = found(
                self,
                window,
                f"at least {passes:.0f} backward passes, and no optimizer step "
                f"{f'since step {window.now.step - 1}' if window.now.step else 'was ever made'}: a GradScaler skips "
                "every update, or the loop does not call `optimizer.step()`.",
                passes=passes,
            )
            yield replace(finding, advice=NEVER_STEPPED)
            return
        if (steps := window.scalar("put_back")) is not None and steps >= self.put_back:
            finding = found(
                self,
                window,
                f"every step moves the weights, and something writes to them before the next one: after {steps:.0f} "
                "steps they are where they were.",
                ("weights",),
                steps=steps,
            )
            yield replace(finding, advice=WRITTEN_BACK)
            return
        if window.scalar("update_ratio") != 0:
            return
        rates = rates_of(window.now.scalars)
        floor = 1e-3 * window.level("grad_norm").start  # below that the run has converged: steps round to nothing
        looks = [s for s in (*window.past, window.now.scalars) if "update_ratio" in s][-self.persist :]
        if len(looks) < self.persist:
            return
        for scalars in looks:
            if scalars["update_ratio"] != 0 or not scalars.get("grad_norm", 0.0) > floor:
                return
            if scalars.get("rejected") or scalars.get("scaler_skipped") or scalars.get("routine_overflow"):
                return
            if not max(rates_of(scalars), default=1.0) > 0:
                return
        before = rates_of(window.past[-1]) if window.past else ()
        if rates and before and max(rates) > 1.001 * max(before) and window.now.step < self.warm:
            return
        yield found(
            self,
            window,
            f"no weight has changed in {self.persist} looks, with a gradient norm of "
            f"{window.scalar('grad_norm'):.3g}{f' and a learning rate of {max(rates):.3g}' if rates else ''}.",
            grad_norm=window.scalar("grad_norm"),
            lr=max(rates, default=None),
        )
