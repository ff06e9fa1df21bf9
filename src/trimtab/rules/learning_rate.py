"""OPT001: the learning rate is not one a run can learn with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.found import found
from trimtab.core.schedule import rates_of
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The learning rate is not one a run can learn with.

    ## What it sees
    A rate is not finite or negative; every rate has been exactly 0 for `idle` steps; or a rate leaps to more than
    `leap` times the highest one ever used, without the batch growing along with it. Warm-up, restarts to a rate used
    before, cycles and new groups stay silent.

    ## Why it matters
    A rate of 0 trains nothing. A sudden rate of ten times the highest one used is nearly always a bug in a schedule,
    a resume that lost its state, or a typo, and the loss follows within a few steps.

    ## What to try
    1. Print the rates around this step: which scheduler or line set them?
    2. After a resume check that the scheduler was restored as well.
    3. Step a scheduler once per batch or once per epoch, as it was configured, not both.
    4. When a trunk is unfrozen give it a tenth of the rate of the head or less.
    """

    code: ClassVar[str] = "OPT001"
    name: ClassVar[str] = "learning-rate"
    needs: ClassVar[tuple[str, ...]] = ("lr/0",)
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    leap: float = 8.5
    idle: int = 6
    min_history: int = 5

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on impossible rates and on leaps."""
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
        if schedule.num_seen < self.min_history or not top > self.leap * schedule.highest > 0:
            return
        size = window.scalar("batch_size")
        if size is not None and size > 0.5 * schedule.batch_size * top / schedule.highest:
            return
        yield found(
            self,
            window,
            f"the learning rate leaps from {max(schedule.rates):.3g} to {top:.3g}; the highest so far was "
            f"{schedule.highest:.3g}.",
            ("lr",),
            lr=top,
            before=max(schedule.rates),
            highest=schedule.highest,
        )
