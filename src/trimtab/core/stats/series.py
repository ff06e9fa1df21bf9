"""Bounded, poison-proof memory of one scalar: what is usual for it, and how unusual a new value is."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean, variance
from typing import Any

SIZE = 128
NUM_FIRST = 8
SPAN = 64
LOG_SPREAD_FLOOR = 0.1
"""Smallest spread of logs that is believed: a constant history must not turn a 1 % wobble into an alarm."""


class Series:
    """The last `SIZE` finite values of a scalar, its first few, and its extremes.

    Non-finite values never get in, so no NaN can blind a detector.
    """

    __slots__ = ("_first", "_highest", "_highs", "_num", "_values", "recent_max")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=SIZE)
        self._first: list[float] = []
        self._num = 0
        self._highest = -math.inf
        self.recent_max = -math.inf  # the largest value still remembered
        self._highs = (-math.inf, -math.inf)  # the largest value at the last two multiples of SPAN

    def push(self, value: float) -> None:
        """Take in one value; a non-finite one is ignored."""
        if not isfinite(value):
            return
        values = self._values
        if len(values) == SIZE and values[0] >= self.recent_max:
            self.recent_max = max(list(values)[1:], default=-math.inf)  # the largest one leaves
        values.append(value)
        if value > self.recent_max:
            self.recent_max = value
        if self._num % SPAN == 0:
            self._highs = (self._highs[1], self._highest)
        self._num += 1
        if value > self._highest:
            self._highest = value
        if len(self._first) < NUM_FIRST:
            self._first.append(value)

    def push_all(self, values: list[float]) -> None:
        """Take in several finite values."""
        since = self._num % SPAN
        if len(self._first) < NUM_FIRST or since == 0 or since + len(values) > SPAN:
            for value in values:
                self.push(value)
            return
        self._values.extend(values)
        self._num += len(values)
        self.recent_max = max(self._values)
        if (most := max(values)) > self._highest:
            self._highest = most

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_seen(self) -> int:
        """How many values were ever taken in."""
        return self._num

    @property
    def highest(self) -> float:
        """The largest value ever taken in; -inf before the first."""
        return self._highest

    @property
    def highest_before(self) -> float:
        """The largest value but for the last 64 to 128; -inf where there are no older ones."""
        return self._highs[0]

    @property
    def initial(self) -> float:
        """The median of the first values: the level the run started from; NaN before the first."""
        return _median(self._first)

    def values(self) -> list[float]:
        """The remembered values, oldest first."""
        return list(self._values)

    def max_after(self, num: int) -> float:
        """The largest of the values that will still be remembered after `num` more; -inf when there is none."""
        leaving = len(self._values) + num - SIZE
        return self.recent_max if leaving <= 0 else max(list(self._values)[leaving:], default=-math.inf)

    def median(self) -> float:
        """The median of the remembered values; NaN when there is none."""
        return _median(self._values)

    def log_z(self, value: float) -> float:
        """How many robust deviations `value` lies above the usual level, on the log scale; 0 when it cannot be said."""
        logs = [math.log(v) for v in self._values if v > 0]
        if len(logs) < NUM_FIRST or not value > 0:
            return 0.0
        centre, spread = _centre_and_spread(logs)
        return (math.log(value) - centre) / max(spread, LOG_SPREAD_FLOOR)

    def z(self, value: float) -> float:
        """How many robust deviations `value` lies above the usual level, on the linear scale."""
        if len(self._values) < NUM_FIRST:
            return 0.0
        centre, spread = _centre_and_spread(list(self._values))
        return (value - centre) / max(spread, 1e-3 * abs(centre), 1e-12)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        highest = self._highest if self._num else None
        highs = [None if high == -math.inf else high for high in self._highs]
        return {
            "values": list(self._values),
            "first": list(self._first),
            "num": self._num,
            "highest": highest,
            "highs": highs,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Series:
        """The series that `state_dict` described."""
        new = cls()
        new._values.extend(state["values"])
        new.recent_max = max(new._values, default=-math.inf)
        new._first = list(state["first"])
        new._num = int(state["num"])
        new._highest = -math.inf if state["highest"] is None else float(state["highest"])
        # States from before these were kept know only the largest of all: that is no lower than any of them.
        highs = state.get("highs", (state["highest"], state["highest"]))
        older, old = (-math.inf if high is None else float(high) for high in highs)
        new._highs = (older, old)
        return new


def _median(values: deque[float] | list[float]) -> float:
    if not values:
        return math.nan
    ordered = sorted(values)
    mid = len(ordered) // 2
    return ordered[mid] if len(ordered) % 2 else ordered[mid - 1] / 2 + ordered[mid] / 2


def _centre_and_spread(values: list[float]) -> tuple[float, float]:
    centre = _median(values)
    return centre, 1.4826 * _median([abs(v - centre) for v in values])


SURELY = 3.0


def is_falling(values: Sequence[float], *, at_least: float) -> bool:
    """Whether the newer half lies below the older one by at least so much, and beyond what chance does.

    Example:
        >>> is_falling([1.0 - 0.01 * i + 0.05 * (i % 3) for i in range(64)], at_least=0.1)
        True
        >>> is_falling([1.0 + 0.05 * (i % 3) for i in range(64)], at_least=0.001)
        False
    """
    half = len(values) // 2
    if half < 8:
        return False
    older, newer = values[:half], values[-half:]
    fallen = fmean(older) - fmean(newer)
    return fallen > at_least and fallen > SURELY * math.sqrt((variance(older) + variance(newer)) / half)
