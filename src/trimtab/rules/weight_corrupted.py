"""WGT004: weights or moments were changed between steps, and not by the optimizer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCorrupted:
    """Weights or moments were changed between steps, and not by the optimizer.

    ## What it sees
    Part of every weight and every optimizer moment is copied after each step and compared before the next one. What
    changed in between, by more than `size` and `times` the usual update, was written by something else. Constraints
    that act again and again (clamping, weight clipping, slow weights) are learned in the first steps and stay silent,
    and so do `load_state_dict` and a swap that is undone before the next step.

    ## Why it matters
    Faulty memory, a stray in-place operation, an EMA that was swapped in and never out, a callback that
    re-initialises a layer: the loss may barely move, and the model is no longer the one that was trained.

    ## What to try
    1. Look for code that runs between the steps and writes to parameters: callbacks, EMA swaps, pruning, `.data`
       assignments.
    2. If the change is meant, load it with `load_state_dict`, or ignore this rule.
    3. Without such code suspect the hardware: run the step again on another device.
    4. Go back to the last good checkpoint.
    """

    code: ClassVar[str] = "WGT004"
    name: ClassVar[str] = "weight-corrupted"
    needs: ClassVar[tuple[str, ...]] = ("outside", "state_outside")
    hold: ClassVar[int] = 1
    severity: Severity = Severity.ERROR
    size: float = 0.03
    times: float = 8.0
    moments: float = 0.3
    habit: int = 2
    young: int = 12

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on a change that is large and not a habit."""
        if window.now.step < self.young:
            return  # a constraint that acts again and again has to be seen once or twice before it is known
        change, moments = window.scalar("outside"), window.scalar("state_outside")
        usual = window.history("update_ratio")
        habit = sum(1 for s in window.past if s.get("outside")), sum(1 for s in window.past if s.get("state_outside"))
        limit = max(self.size, self.times * usual.median() if len(usual) else 0.0)
        if change is not None and limit <= change < math.inf and habit[0] < self.habit:
            names = window.now.notes.get("outside", ())
            known = window.earlier("update_ratio")
            whose = f", whose steps are usually {known.usual:.4g}" if known.num else ""
            yield found(
                self,
                window,
                f"{listed(names)} changed by {change:.4g} times its size between two steps, and not by the optimizer"
                f"{whose}.",
                names,
                change=change,
                usual=known.usual if known.num else None,
            )
        elif (
            moments is not None
            and not moments < self.moments
            and habit[1] < self.habit
            and not window.scalar("state_lost")
        ):
            names = window.now.notes.get("state_outside", ())
            yield found(
                self,
                window,
                f"optimizer state was changed by {moments:.3g} times its size between two steps: {listed(names)}.",
                names,
                change=moments,
            )
