"""OPT001: the learning rate is not one a run can learn with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.schedule import JUMP, MIN_HISTORY, rates_of
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The learning rate is not one a run can learn with.

    ## What it sees
    A rate is not finite or negative; every rate has been exactly 0 for `idle` steps; or a rate jumps to more than
    8.5 times the highest one ever used, without the batch growing along with it, and within `reach` steps an update
    is above `ratio` of the size of the weights. Or it grows at every step by nearly the same factor, `steps` times in a
    row and to more than `grown` times what it was, and steps have become too large: above `ratio`, or the loss leaves
    its best level. Warm-up (whose factor comes down to 1), restarts to a rate used before, cycles and new groups stay
    silent.

    ## Why it matters
    A rate of 0 trains nothing. A sudden rate of ten times the highest one used is nearly always a bug in a schedule,
    a resume that lost its state, or a typo, and the loss follows within a few steps.

    ## What to try
    1. Find what set the learning rate at this step: a scheduler, a resume, or a line of the loop.
    2. After a resume check that the scheduler was restored as well.
    3. Step a scheduler once per batch or once per epoch, as it was configured, not both.
    """

    code: ClassVar[str] = "OPT001"
    name: ClassVar[str] = "learning-rate"
    needs: ClassVar[tuple[str, ...]] = ("lr/0",)
    hold: ClassVar[int] = 20
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR
    ratio: float = 0.03
    reach: int = 8
    idle: int = 6
    grown: float = 5.0
    steps: int = 16

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on impossible rates and on jumps."""
        rates = rates_of(window.now.scalars)
        bad = [r for r in rates if not math.isfinite(r) or r < 0]
        if bad:
            yield found(self, window, f"the learning rate is {bad[0]}.", ("lr",), lr=bad[0])
            return
        if not rates:
            return
        schedule, top = window.schedule, max(rates)
        # A schedule may end at 0 with a few steps to go; a run that begins there, or stays there, trains nothing.
        if top == 0 and schedule.idle_steps + 1 >= (self.idle if schedule.highest == 0 else 10 * self.idle):
            yield found(
                self, window, f"every learning rate has been 0 for {schedule.idle_steps + 1} steps.", ("lr",), lr=0.0
            )
            return
        yield from self._jump(window, top)
        yield from self._growth(window, top)

    def _growth(self, window: Window, top: float) -> Iterator[Finding]:
        """A rate that is multiplied at every step: a fault of the schedule, named before the explosion it leads to."""
        steps, base = window.schedule.growth(top)
        if steps < self.steps or not top > self.grown * base > 0:
            return
        ratios, loss = sorted(window.last("update_ratio", 5)), window.level("loss")
        large = len(ratios) > 2 and ratios[len(ratios) // 2] > self.ratio
        climbs = len(loss) > self.steps and loss.now > loss.best + max(3.0 * loss.calm_noise, 0.05 * abs(loss.best))
        if not large and not climbs:
            return
        yield found(
            self,
            window,
            f"the learning rate has grown at each of the last {steps} steps, by the same factor, from {base:.3g} to "
            f"{top:.3g}.",
            ("lr",),
            lr=top,
            before=base,
            update_ratio=ratios[len(ratios) // 2] if ratios else None,
            onset=float(window.now.step - steps),
        )

    def _jump(self, window: Window, top: float) -> Iterator[Finding]:
        """A jump counts once the steps are large for the weights: the end of a constant warm-up is a jump as well."""
        schedule, step = window.schedule, window.now.step
        now = schedule.num_seen >= MIN_HISTORY and top > JUMP * schedule.highest > 0
        if not now and step - schedule.jumped_at > self.reach:
            return
        base = schedule.highest if now else schedule.jumped_from
        size, ratio = window.scalar("batch_size"), window.scalar("update_ratio")
        if top < JUMP * base or (ratio is not None and ratio < self.ratio):
            return
        if size is not None and now and size > 0.5 * schedule.batch_size * top / base:
            return
        yield found(
            self,
            window,
            f"the learning rate jumped to {top:.3g}; the highest before was {base:.3g}.",
            ("lr",),
            lr=top,
            highest=base,
            update_ratio=ratio,
        )
