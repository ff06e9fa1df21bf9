"""OPT001: the learning rate is not one a run can learn with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from trimtab.core.harm import is_fixed_objective
from trimtab.core.schedule import JUMP, MIN_HISTORY, rates_of
from trimtab.core.types import Finding, Severity
from trimtab.core.window import NUM_PAST, Window, found

NEARLY = 1.1
"""Growth by a steady factor that began further above the rate held before is the middle of a smooth ramp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRate:
    """The learning rate is not one a run can learn with.

    ## What it sees
    A rate is not finite or negative; every rate has been exactly 0 for `idle` steps; or a rate jumps to more than
    8.5 times the highest one ever used, without the batch growing along with it, and within `reach` steps an update
    is above `ratio` of the size of the weights. Or it grows at every step by nearly the same factor, `steps` times in a
    row and to more than `grown` times what it was, and steps have become too large: above `ratio`, or the loss leaves
    its best level. A rate that was held before is known to be the one to train with: if it is multiplied step by step
    to `above` times the highest that was used, that is enough, as soon as steps move the weights by `moves`; if it
    climbs in another way, the loss must leave its best level with it, or it is `raised` times as high, and steps were
    of a usual size while it was held. A rate that grows from the start by a steady factor, to
    `unnoticed` times what it was, is no warm-up where the first steps moved the weights by `full`.
    Or (a warning) every rate of the last 64 steps is below `gone` of the highest one, although all
    steps so far amount to less than `early` at that rate: the schedule has ended before the run has begun. Warm-up
    (whose factor comes down to 1), restarts to a rate used before, cycles and new groups stay silent.

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
    above: float = 1.5
    moves: float = 3e-4
    rises: int = 8
    raised: float = 10.0
    unnoticed: float = 4.0
    full: float = 2e-3
    gone: float = 1e-3
    early: float = 300.0

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
        if 0 < top < self.gone * schedule.highest and schedule.effort < self.early:
            yield from self._vanished(window, rates)

    def _growth(self, window: Window, top: float) -> Iterator[Finding]:
        """A rate that is multiplied at every step: a fault of the schedule, named before the explosion it leads to."""
        steps, base = window.schedule.growth(top)
        times, held = window.schedule.climb(top)
        ratios = sorted(window.last("update_ratio", 5))
        ratio = ratios[len(ratios) // 2] if len(ratios) > 2 else None
        if self._multiplied(window, top, ratio):
            how = f"at each of the last {steps} steps, by the same factor,"
        elif times >= self.rises and top > self.above * held > 0 and self._leaves_all_behind(window, top, ratio):
            how, steps, base = f"{times} times, step after step,", times, held
        else:
            return
        yield found(
            self,
            window,
            f"the learning rate has grown {how} from {base:.3g} to {top:.3g}.",
            ("lr",),
            lr=top,
            before=base,
            update_ratio=ratio,
            onset=float(window.now.step - steps),
        )

    def _multiplied(self, window: Window, top: float, ratio: float | None) -> bool:
        """Whether the rate grows by a steady factor, and it is no warm-up."""
        steps, base = window.schedule.growth(top)
        times, held = window.schedule.climb(top)
        if min(steps, times) >= self.rises and top > self.above * held > 0 and base <= NEARLY * held:
            return ratio is None or ratio > self.moves  # from a rate that was held: there is nothing to wait for
        if steps < self.steps or not base > 0:
            return False
        large = ratio is not None and ratio > self.ratio
        # Steps are as large as the rate: what they were when it began to grow, and whether a warm-up begins so.
        began_large = ratio is not None and ratio * base / top > self.full
        return (top > self.grown * base and (large or self._climbs(window))) or (
            top > self.unnoticed * base and steps >= 2 * self.steps and began_large
        )

    def _leaves_all_behind(self, window: Window, top: float, ratio: float | None) -> bool:
        """Whether the rate climbs in another way: the loss with it, or farther than any ramp to the one meant."""
        times, held = window.schedule.climb(top)
        if not is_fixed_objective(window):
            return False
        far = times >= 2 * self.steps and top > self.raised * held
        return self._climbs(window) or (far and ratio is not None and ratio * held / top > self.full / 2)

    def _climbs(self, window: Window) -> bool:
        """Whether the loss leaves its best level."""
        loss = window.level("loss")
        return len(loss) > self.steps and loss.now > loss.best + max(3.0 * loss.calm_noise, 0.05 * abs(loss.best))

    def _vanished(self, window: Window, rates: tuple[float, ...]) -> Iterator[Finding]:
        """A schedule that is stepped per batch but was made for epochs, or that ends far too soon."""
        schedule, past = window.schedule, window.past
        if rates == schedule.rates and not window.now.layout.has_weight_norms:
            return  # said while the rate falls, and in thorough looks
        highest = max((max(rates_of(scalars), default=0.0) for scalars in past), default=math.inf)
        if len(past) < NUM_PAST or highest >= self.gone * schedule.highest:
            return
        finding = found(
            self,
            window,
            f"the learning rate is {max(rates):.3g}, and was {schedule.highest:.3g} at its highest: after "
            f"{schedule.num_seen} steps the schedule has left nothing to learn with.",
            ("lr",),
            lr=max(rates),
            highest=schedule.highest,
            effort=schedule.effort,
        )
        yield replace(finding, severity=Severity.WARN)  # a run may be meant to end here

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
