"""What to clip and by which strategy: fixed limits, or limits that follow the run's own gradient norms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.core.config_read import (
    Reader,
    bad,
    between,
    boolean,
    integer,
    maybe,
    meant,
    positive,
    read_table,
)


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


def read_clip(value: Any, name: str) -> Clip:
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
