"""Limits of the gradient norm that follow the run: bounded memory of accepted norms, into which no NaN can get."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from trimtab.core.clipping import Clip, Percentile, ZScore

SPREAD_FLOOR = 0.1
"""Smallest deviation of log norms that is believed: a steady run must not be clipped for a wobble of 1 %."""


class NormLimit(Protocol):
    """What the largest gradient norm is now, by what it was in the steps that were let through."""

    def push(self, norm: float) -> None:
        """Take in the norm of an accepted step; one that is not finite, or zero, is ignored."""
        ...

    def limit(self) -> float | None:
        """The largest norm to let through; None while warming up."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        ...


def norm_limit(clip: Clip) -> NormLimit | None:
    """The memory that a strategy needs; None where limits are fixed or come from the weights."""
    if isinstance(clip.adaptive, Percentile):
        return PercentileLimit(clip.adaptive)
    if isinstance(clip.adaptive, ZScore):
        return ZScoreLimit(clip.adaptive)
    return None


def _counts(norm: float) -> bool:
    """A step without any gradient has norm 0 and says nothing; a history of zeros would clip everything to nothing."""
    return math.isfinite(norm) and norm > 0.0


class PercentileLimit:
    """A percentile of the last accepted norms, as they were before clipping: a percentile bears outliers."""

    def __init__(self, settings: Percentile) -> None:
        self._settings = settings
        self._norms: deque[float] = deque()
        self._ordered: list[float] = []  # the same in order, kept so: sorting 512 values in every step would cost

    def push(self, norm: float) -> None:
        """Take in one norm, and forget the oldest where the window is full."""
        if not _counts(norm):
            return
        if len(self._norms) == self._settings.window:
            oldest = self._norms.popleft()
            del self._ordered[bisect_left(self._ordered, oldest)]
        self._norms.append(norm)
        insort(self._ordered, norm)

    def limit(self) -> float | None:
        """The percentile, between two norms by linear interpolation."""
        if len(self._ordered) < self._settings.warmup:
            return None
        place = (len(self._ordered) - 1) * self._settings.percentile / 100.0
        low = self._ordered[int(place)]
        high = self._ordered[min(int(place) + 1, len(self._ordered) - 1)]
        return low + (high - low) * (place - int(place))

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"strategy": "percentile", "norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; what another strategy remembered is of no use here."""
        if state.get("strategy") == "percentile":
            self._norms.clear()
            self._ordered.clear()
            for norm in state["norms"]:
                self.push(float(norm))


class ZScoreLimit:
    """Moving average and variance of the logarithm of accepted norms.

    Norms are positive and skewed: on the linear scale one spike of 10,000 times the usual stretches the deviation so
    far that the next one passes; on the log scale it counts about nine. What enters is bounded by the limit as well: a
    spike that was clipped moves the average no more than a norm at the limit does, and a run whose norms grow for good
    takes its limit along.
    """

    def __init__(self, settings: ZScore) -> None:
        self._settings = settings
        self._num = 0
        self._mean = self._variance = 0.0

    def push(self, norm: float) -> None:
        """Take in one norm."""
        if not _counts(norm):
            return
        limit = self.limit()
        value = math.log(norm if limit is None else min(norm, limit))
        self._num += 1
        # While warming up every norm weighs the same; then the weight of the newest stays what it has become at least.
        weight = 1.0 / self._num if self._num <= self._settings.warmup else 1.0 - self._settings.decay
        away = value - self._mean
        self._mean += weight * away
        self._variance = (1.0 - weight) * (self._variance + weight * away * away)

    def limit(self) -> float | None:
        """The norm that lies `z` deviations above the average."""
        if self._num < self._settings.warmup:
            return None
        spread = max(math.sqrt(self._variance), SPREAD_FLOOR)
        return math.exp(min(self._mean + self._settings.z * spread, 700.0))

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"strategy": "zscore", "num": self._num, "mean": self._mean, "variance": self._variance}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; what another strategy remembered is of no use here."""
        if state.get("strategy") == "zscore":
            self._num, self._mean = int(state["num"]), float(state["mean"])
            self._variance = float(state["variance"])
