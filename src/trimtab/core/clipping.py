"""What to clip and by which strategy: fixed limits, or limits that follow the run's own gradient norms."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.core.config_read import Reader, bad, between, boolean, integer, maybe, meant, positive, read_table


@dataclass(frozen=True, slots=True, kw_only=True)
class Agc:
    """Adaptive gradient clipping (Brock et al. 2021): each unit's gradient norm at most `ratio` of its weight norm.

    A unit is a row of a parameter; a parameter of one dimension is one unit. A weight norm below `eps` counts as
    `eps`, so that units that start at zero can move.
    """

    strategy: str = "agc"
    ratio: float = 0.01
    eps: float = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentile:
    """AutoClip (Seetharaman et al. 2020): the limit is a percentile of the last `window` accepted gradient norms."""

    strategy: str = "percentile"
    percentile: float = 90.0
    window: int = 512
    warmup: int = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ZScore:
    """Like ZClip (Kumar et al. 2025): a norm more than `z` deviations above its moving average is cut to that limit.

    Average and deviation are those of the logarithm of the norm, remembered with `decay` per step.
    """

    strategy: str = "zscore"
    z: float = 2.5
    decay: float = 0.97
    warmup: int = 25


Adaptive = Agc | Percentile | ZScore


@dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """What to clip: the global norm, each value, the norm of each parameter group on its own, or by a strategy.

    `norm` is the largest allowed L2 norm of all gradients together; with `per_group=True` of each parameter group.
    A group that carries its own `max_norm` entry uses that. With `above`, a norm up to that is left alone, and only a
    larger one is cut down to `norm`. `value` bounds every single element. `adaptive` is a strategy whose limits follow
    the run.
    """

    norm: float | None = None
    above: float | None = None
    value: float | None = None
    per_group: bool = False
    adaptive: Adaptive | None = None

    def __bool__(self) -> bool:
        return self.norm is not None or self.value is not None or self.adaptive is not None


_STRATEGIES: Mapping[str, tuple[Callable[..., Adaptive], Mapping[str, Reader]]] = {
    "agc": (Agc, {"ratio": positive, "eps": positive}),
    "percentile": (Percentile, {"percentile": between(1, 99), "window": integer(2), "warmup": integer(1)}),
    "zscore": (ZScore, {"z": positive, "decay": between(0.5, 0.9999), "warmup": integer(2)}),
}


def read_clip(value: object, name: str) -> Clip:
    """A number is the largest norm, a word a strategy; a table names either and its settings."""
    if value is None or isinstance(value, Clip):
        return value or Clip()
    if isinstance(value, str):
        return Clip(adaptive=_strategy({"strategy": value}, name, whole=value))
    if isinstance(value, Mapping):
        if "strategy" in value:
            return Clip(adaptive=_strategy(value, name))
        readers = {
            "norm": maybe(positive),
            "above": maybe(positive),
            "value": maybe(positive),
            "per_group": boolean,
            "strategy": maybe(_strategy),  # never called, but suggested to who mistypes it
            "adaptive": maybe(_strategy),  # as `Config.to_dict` writes it
        }
        clip = Clip(**read_table(value, readers, where=name))
        if clip.above is not None and (clip.norm is None or clip.above < clip.norm):
            other = "beside a norm" if clip.norm is None else f"at least the norm of {clip.norm:g}"
            raise bad(f"{name}.above", clip.above, f"a number {other}: what is larger than it is cut down to the norm")
        return clip
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise bad(name, value, f"a finite number above 0, a strategy ({', '.join(_STRATEGIES)}), or a table")
    return Clip(norm=positive(value, name))


def _strategy(settings: Any, name: str, *, whole: Any = None) -> Adaptive:
    chosen = settings.get("strategy") if isinstance(settings, Mapping) else None
    if not isinstance(chosen, str) or chosen not in _STRATEGIES:
        where, shown = (name, whole) if whole is not None else (f"{name}.strategy", chosen)
        also = ", or a number, the largest norm" if whole is not None else ""
        raise bad(where, shown, f"one of {', '.join(_STRATEGIES)}{meant(chosen, _STRATEGIES)}{also}")
    kind, readers = _STRATEGIES[chosen]
    found = read_table(settings, {"strategy": lambda value, _: value, **readers}, where=name)
    adaptive = kind(**found)
    if isinstance(adaptive, Percentile) and adaptive.warmup > adaptive.window:
        raise bad(f"{name}.warmup", adaptive.warmup, f"at most the window of {adaptive.window}: no more is remembered")
    return adaptive


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

    def load_state_dict(self, state: Mapping[str, object]) -> None:
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


class HeldLimit:
    """A limit that was found to help, and stays."""

    def __init__(self, norm: float) -> None:
        self._norm = norm

    def push(self, norm: float) -> None:
        """It does not follow the run."""

    def limit(self) -> float:
        """Always the same."""
        return self._norm

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"held": self._norm}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """A state from before it was held does not release it."""
        self._norm = float(state.get("held", self._norm))


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
