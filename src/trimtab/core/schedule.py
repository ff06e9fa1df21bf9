"""What the loop itself changed: learning rates, parameter groups, batch size. Rules read it before they blame a run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from trimtab.core.types import Sample

RAISED = 1.9
"""A rate this many times higher than before within a step was raised on purpose or by mistake, not by a warm-up."""
JUMP = 8.5
"""A rate this many times above the highest ever used is no schedule: linear scaling with the batch ends at 8."""
MIN_HISTORY = 5
SPAN = 64
"""A rate that was reached within this many steps is new: what lies before is what the run was used to."""
LEAST_GROWTH, STEADY = math.log(1.005), 0.9
"""A rate that grows at every step by at least so much, and each time by nearly the same factor, grows without bound:
the factor of a warm-up or of a cycle changes all the time."""
HELD = 16
"""A rate that did not rise for so many steps was the one to train with: a warm-up is over, or there was none."""
NEVER = -(10**9)
_OLD_NAMES = {"leapt_at": "jumped_at", "leapt_from": "jumped_from"}
"""Of fields in states that were saved by earlier releases."""


class Schedule:
    """The history of the learning rate and of what goes with it, from before the newest sample."""

    def __init__(self) -> None:
        self.num_seen = 0
        self.rates: tuple[float, ...] = ()
        self.highest = 0.0
        self.raised_at = self.grown_at = self.resized_at = self.jumped_at = NEVER
        self.jumped_from = 0.0  # the highest rate before the last jump
        self.batch_size = math.nan  # the usual one: of the last batch that was not much smaller than those before
        self.small_before = False
        self.idle_steps = 0  # consecutive steps with every rate at 0
        self.highs: deque[float] = deque(maxlen=SPAN)  # the highest rate so far, after each of the last steps
        self.grows_for = 0  # consecutive steps with a rate that grew by a steady factor
        self.grows_from, self._factor = 0.0, 0.0  # the rate before them, and the logarithm of the first factor
        self.still_for = 0  # consecutive steps in which the rate did not rise
        self.climb_from, self.climb_steps = 0.0, 0  # see `climb`
        self.effort = 0.0  # steps so far, each counted by its rate over the highest: what a warm-up delays

    def absorb(self, sample: Sample) -> None:
        """Take in the rates of one step."""
        rates = rates_of(sample.scalars)
        if rates:
            top, before = max(rates), max(self.rates, default=0.0)
            if self.rates and len(rates) > len(self.rates):
                self.grown_at = sample.step
            if math.isfinite(top):
                self._grow(before, top)
                self._climb(before, top)
                if before > 0 and top > RAISED * before and self.num_seen > 2:
                    self.raised_at = sample.step
                if self.num_seen >= MIN_HISTORY and top > JUMP * self.highest > 0:
                    self.jumped_at, self.jumped_from = sample.step, self.highest
                self.effort = self.effort * min(1.0, self.highest / top) if top > self.highest > 0 else self.effort
                self.highest = max(self.highest, top)
                self.effort += top / self.highest if self.highest > 0 else 0.0
            self.highs.append(self.highest)
            self.idle_steps = self.idle_steps + 1 if top == 0 else 0
            self.rates = rates
        size = sample.scalars.get("batch_size")
        if size is not None:
            self._sized(size, sample.step)
        self.num_seen += 1

    def _grow(self, before: float, top: float) -> None:
        by = _factor(before, top)
        if not LEAST_GROWTH < by < math.log(RAISED):
            self.grows_for = 0
        elif self.grows_for and STEADY * self._factor <= by <= self._factor / STEADY:
            self.grows_for += 1
        else:
            self.grows_for, self.grows_from, self._factor = 1, before, by

    def _climb(self, before: float, top: float) -> None:
        """Whether the rate rises above the highest that was ever used, after it was held: not at a warm-up."""
        if top > before:
            if self.still_for >= HELD:
                self.climb_from, self.climb_steps = self.highest, 0
            self.climb_steps += 1
            self.still_for = 0
            return
        self.still_for += 1
        if top < before or self.still_for >= HELD:
            self.climb_from = 0.0

    def climb(self, top: float) -> tuple[int, float]:
        """How often a rate of `top` in the newest sample would have risen since one was held, and the highest before.

        (0, 0) where no rate was held before, as at a warm-up, or where it fell or stands still since.
        """
        rises = top > max(self.rates, default=0.0)
        if rises and self.still_for >= HELD:
            return 1, self.highest
        return (self.climb_steps + int(rises), self.climb_from) if self.climb_from > 0 else (0, 0.0)

    def growth(self, top: float) -> tuple[int, float]:
        """For how many steps a rate of `top` in the newest sample would have grown steadily, and from which rate."""
        by = _factor(max(self.rates, default=0.0), top)
        steady = self.grows_for > 0 and STEADY * self._factor <= by <= self._factor / STEADY
        return (self.grows_for + 1, self.grows_from) if steady else (0, top)

    def absorb_same(self, num: int, *, sized: bool) -> None:
        """Take in steps with the rates that the last one had, and where the size of batches is told, the usual one."""
        if sized:
            self.small_before = False
        if num:
            self.grows_for = 0
            self.still_for += num
            if self.still_for >= HELD:
                self.climb_from = 0.0
        if self.rates:
            share = max(self.rates) / self.highest if self.highest > 0 else 0.0
            for _ in range(num):  # one by one, because sums are not the same otherwise
                self.effort += share
            self.highs.extend([self.highest] * num)
        self.num_seen += num

    def _sized(self, size: float, step: int) -> None:
        """Take in the size of a batch. A larger one is new at once, a smaller one when it lasts.

        The rest at the end of an epoch is one small batch between usual ones: what is known of the loss stays known.
        """
        if not size > 0 or not self.batch_size > 0:
            self.batch_size = size if size > 0 else self.batch_size
            return
        small = size <= 0.5 * self.batch_size
        if size >= 2.0 * self.batch_size or (small and self.small_before):
            self.resized_at, self.batch_size, self.small_before = step, size, False
            return
        self.small_before = small
        if not small:
            self.batch_size = size

    @property
    def used_to(self) -> float:
        """The highest rate ever used, but for the last `SPAN` steps; NaN in a run that is younger than that."""
        return self.highs[0] if len(self.highs) == SPAN else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {
            "num_seen": self.num_seen,
            "rates": list(self.rates),
            "highest": self.highest,
            "raised_at": self.raised_at,
            "grown_at": self.grown_at,
            "resized_at": self.resized_at,
            "jumped_at": self.jumped_at,
            "jumped_from": self.jumped_from,
            "batch_size": None if math.isnan(self.batch_size) else self.batch_size,
            "small_before": self.small_before,
            "idle_steps": self.idle_steps,
            "grows": [self.grows_for, self.grows_from, self._factor],
            "climb": [self.still_for, self.climb_from, self.climb_steps],
            "effort": self.effort,
            "highs": list(self.highs),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Schedule:
        """The schedule that `state_dict` described."""
        new = cls()
        for name, value in state.items():
            if name not in ("grows", "climb"):
                setattr(new, _OLD_NAMES.get(name, name), value)
        new.grows_for, new.grows_from, new._factor = state.get("grows", (0, 0.0, 0.0))
        new.still_for, new.climb_from, new.climb_steps = state.get("climb", (0, 0.0, 0))
        new.highs = deque(state.get("highs", ()), maxlen=SPAN)
        new.rates = tuple(float(r) for r in state["rates"])
        new.batch_size = math.nan if state["batch_size"] is None else float(state["batch_size"])
        return new


def _factor(before: float, now: float) -> float:
    """The logarithm of what a rate was multiplied by; 0 where that cannot be said."""
    return math.log(now) - math.log(before) if 0 < now < math.inf and 0 < before < math.inf else 0.0


def rates_of(scalars: Mapping[str, float]) -> tuple[float, ...]:
    """The learning rate of every parameter group."""
    if "lr/1" not in scalars:
        return (scalars["lr/0"],) if "lr/0" in scalars else ()
    rates: list[float] = []
    while (rate := scalars.get(f"lr/{len(rates)}")) is not None:
        rates.append(rate)
    return tuple(rates)
