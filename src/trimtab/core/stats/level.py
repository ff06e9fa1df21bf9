"""Where a noisy series stands: its level now, its best level, the noise around them; and whether it drifts upwards."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

SHORT = 9
FIRST = 3
NOISE_DECAY = 0.97
LUCK = 1.5
"""Times the noise: so far from where a series stands all the time a level may come to lie in a long run."""


class Level:
    """Running medians of a scalar. Non-finite values never get in.

    `best` is the lowest level the series ever settled at, `noise` a running mean of the distance of single values from
    the level, times 1.25: about one standard deviation for normal noise. `best_noise` is what it was at the best level:
    a series that climbs must not hide in the noise of its own climb.
    `sure` is the lowest level that the series was below beyond doubt.
    """

    __slots__ = ("_first", "_num", "_recent", "best", "best_noise", "noise", "now", "sure")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=SHORT)
        self._first: list[float] = []
        self._num = 0
        self.now = math.nan  # the median of the last values
        self.best = self.sure = math.inf
        self.best_noise = 0.0
        self.noise = 0.0

    def push(self, value: float) -> None:
        """Take in one value."""
        if not math.isfinite(value):
            return
        recent, num = self._recent, self._num
        if len(recent) == SHORT:
            off = min(1.25 * abs(value - self.now), 1e300)
            # Noise is learned fast at first, and a single outlier counts for no more than a few of itself.
            bound = max(8.0 * self.noise, 1e-12) if num > 3 * SHORT else off
            weight = max(1.0 - NOISE_DECAY, 1.0 / max(num - SHORT + 1, 1))
            self.noise += weight * (min(off, bound) - self.noise)
        recent.append(value)
        now = self.now = sorted(recent)[len(recent) // 2]
        self._num = num = num + 1
        if len(self._first) < FIRST:
            self._first.append(value)
        if now < self.best and len(recent) == SHORT:
            self.best = now
            # Before enough was seen the noise is a guess, and a best level of the first steps keeps a later one.
            self.best_noise = self.noise if num > 3 * SHORT else 0.0
        if num > 3 * SHORT and (high := now + LUCK * self.noise) < self.sure:
            self.sure = high

    @property
    def least(self) -> float:
        """The smallest of the last values, of which `now` is the median; NaN before the first."""
        return min(self._recent, default=math.nan)

    @property
    def calm_noise(self) -> float:
        """The noise when the level was best, or all there is where it was best before the noise was known."""
        return max(self.best_noise, 0.3 * self.noise) if self.best_noise > 0 else self.noise

    def least_noise(self, num: int) -> float:
        """No less than this is `calm_noise` after `num` more values, whatever they are."""
        weight = max(1.0 - NOISE_DECAY, 1.0 / max(self._num - SHORT + 1, 1))
        left = self.noise * (1.0 - weight) ** num
        return min(left, self.best_noise) if self.best_noise > 0 else left

    def rebase(self) -> None:
        """Forget the best level: the loop changed what it means."""
        self.best, self.best_noise, self.sure = self.now, self.noise, self.now + LUCK * self.noise

    def __len__(self) -> int:
        return self._num

    @property
    def start(self) -> float:
        """The median of the very first values."""
        return _median(self._first)

    @property
    def start_max(self) -> float:
        """The largest of the very first values; NaN before the first."""
        return max(self._first, default=math.nan)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        best = self.best if math.isfinite(self.best) else None
        return {
            "recent": list(self._recent),
            "first": list(self._first),
            "num": self._num,
            "best": best,
            "best_noise": self.best_noise,
            "sure": self.sure if math.isfinite(self.sure) else None,
            "noise": self.noise,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Level:
        """The level that `state_dict` described."""
        new = cls()
        new._recent.extend(state["recent"])
        new.now = _median(new._recent)
        new._first = list(state["first"])
        new._num = int(state["num"])
        new.best = math.inf if state["best"] is None else float(state["best"])
        sure = state.get("sure", state["best"])
        new.sure = math.inf if sure is None else float(sure)
        new.best_noise, new.noise = float(state["best_noise"]), float(state["noise"])
        return new


def _median(values: deque[float] | list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else math.nan


SLACK = 2.5
CAP = 6.0
LIMIT = 20.0
"""With these a run that stays at its reference level, under normal noise, is alarmed less than once in ten million
steps (tests/core/test_cusum.py simulates it); a rise by six deviations is found after six steps."""


class Cusum:
    """The sum, and where it last began to grow: the change point."""

    __slots__ = ("onset", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.onset = -1

    def push(self, z: float, step: int) -> None:
        """Take in one value in units of the noise; a single outlier counts for no more than `CAP`."""
        if not math.isfinite(z):
            return
        if self.total == 0.0:
            self.onset = step
        self.total = max(0.0, self.total + min(z, CAP) - SLACK)

    @property
    def alarmed(self) -> bool:
        """Whether the sum is beyond chance."""
        return self.total > LIMIT

    def reset(self) -> None:
        """Start over: the reference has changed."""
        self.total, self.onset = 0.0, -1

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {"total": self.total, "onset": self.onset}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cusum:
        """The sum that `state_dict` described."""
        new = cls()
        new.total, new.onset = float(state["total"]), int(state["onset"])
        return new
