"""What the charts of the report page show: a run reduced to series, and layers over time in one byte per cell."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trimtab.core.types import ABSENT, F32, FROZEN, Column, Kind
from trimtab.record.reader import Run
from trimtab.report.chart import Floats, Ints, pick_points

MAX_STRETCHES = 512
_MAX_PENDING = 1 << 22  # floats

# A cell's byte: what is not a positive finite number has a code of its own, the rest is a logarithm within its row.
UNKNOWN, FROZEN_CELL, NO_GRADIENT, ZERO, FIRST, LAST, INF, NAN = 0, 1, 2, 3, 4, 253, 254, 255
_NOT_MEASURED = np.float32(-3.0)  # below ABSENT and FROZEN, so that a maximum prefers whatever was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """The norms of all parameters over a run; column `i` covers `width` steps from `first_step + i * width` on.

    A code `c` from FIRST to LAST means `2 ** (low + (c - FIRST) / (LAST - FIRST) * (high - low))` of its row.
    """

    names: tuple[str, ...]
    first_step: int
    width: int
    codes: NDArray[np.uint8]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


class HeatTable:
    """Takes the norms of a run as they come, in bounded memory: too many columns, and neighbours become one.

    A cell is the largest norm of its stretch. NaN and Inf are larger than everything, zero is larger than a missing
    gradient, and that is larger than not measured.

    Example:
        >>> table = HeatTable(max_stretches=4)
        >>> for step in range(10):
        ...     table.add(step, ("w",), np.array([step], dtype=np.float32))
        >>> heat = table.finish()
        >>> heat.width, heat.codes.shape
        (4, (1, 3))
    """

    def __init__(self, max_stretches: int = MAX_STRETCHES) -> None:
        self.max_stretches = max_stretches
        self.width = 1
        self._steps: list[int] = []
        self._rows: dict[str, int] = {}
        self._pending: dict[int, tuple[tuple[str, ...], list[int], list[F32]]] = {}
        self._num_pending = 0
        self._base = 0
        self._norms = np.empty((0, 0), dtype=np.float32)  # column by row; column 0 starts at step base * width

    def add(self, step: int, names: tuple[str, ...], norms: F32) -> None:
        """Take one sample's norms."""
        # A layout names its rows with one tuple for all its samples: compared by identity, not name by name.
        _, steps, parts = self._pending.setdefault(id(names), (names, [], []))
        steps.append(step)
        parts.append(norms)
        self._steps.append(step)
        self._num_pending += norms.size
        if self._num_pending > _MAX_PENDING:
            self._flush()

    def finish(self) -> HeatMap | None:
        """All that was taken, in one byte per cell; None where nothing was."""
        self._flush()
        if not self._steps:
            return None
        apart = np.diff(np.unique(self._steps))
        usual = float(np.quantile(apart, 0.95)) if apart.size else 1.0
        while self.width < usual and len(self._norms) > 1:  # a thinned record must not leave stripes
            self._widen()
        codes, low, high = quantise(self._norms.T)
        first = self._base * self.width
        return HeatMap(names=tuple(self._rows), first_step=first, width=self.width, codes=codes, low=low, high=high)

    def _flush(self) -> None:
        for names, steps, parts in self._pending.values():
            self._merge(names, np.array(steps, dtype=np.int64), np.stack(parts))
        self._pending.clear()
        self._num_pending = 0

    def _merge(self, names: tuple[str, ...], steps: Ints, part: F32) -> None:
        first, last = int(steps.min()), int(steps.max())
        if len(self._norms):
            first = min(first, self._base * self.width)
            last = max(last, (self._base + len(self._norms)) * self.width - 1)
        while last // self.width - first // self.width >= self.max_stretches:
            self._widen()
        rows = [self._rows.setdefault(name, len(self._rows)) for name in names]
        self._reach(first // self.width, last // self.width)
        columns = steps // self.width - self._base
        if (np.diff(columns) < 0).any():  # after a rewind steps go back
            order = np.argsort(columns, kind="stable")
            part, columns = part[order], columns[order]
        columns, starts = np.unique(columns, return_index=True)
        where = np.ix_(columns, np.array(rows, dtype=np.int64))
        self._norms[where] = np.maximum(self._norms[where], np.maximum.reduceat(part, starts, axis=0))

    def _reach(self, first: int, last: int) -> None:
        """Make room for these columns and for every row known by now."""
        old, base = self._norms, self._base if len(self._norms) else first
        self._norms = np.full((last - first + 1, len(self._rows)), _NOT_MEASURED, dtype=np.float32)
        self._norms[base - first : base - first + len(old), : old.shape[1]] = old
        self._base = first

    def _widen(self) -> None:
        if len(self._norms):
            columns = (self._base + np.arange(len(self._norms))) // 2
            self._norms = np.maximum.reduceat(self._norms, np.unique(columns, return_index=True)[1], axis=0)
            self._base //= 2
        self.width *= 2


def quantise(norms: F32) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.float64]]:
    """One byte per cell, and the range of log2 of each row."""
    known = np.isfinite(norms) & (norms > 0)
    logs = np.log2(np.where(known, norms, 1.0).astype(np.float64))
    low = np.where(known, logs, np.inf).min(axis=1, initial=np.inf)
    high = np.where(known, logs, -np.inf).max(axis=1, initial=-np.inf)
    low, high = np.where(np.isfinite(low), low, 0.0), np.where(np.isfinite(high), high, 0.0)
    span = np.where(high > low, high - low, 1.0)
    level = FIRST + np.rint((logs - low[:, None]) / span[:, None] * (LAST - FIRST))
    special = np.select(
        [np.isnan(norms), np.isinf(norms), norms == 0, norms == ABSENT, norms == FROZEN],
        [NAN, INF, ZERO, NO_GRADIENT, FROZEN_CELL],
        default=UNKNOWN,
    )
    return np.where(known, level, special).astype(np.uint8), low, high


WIDE = 50.0
"""From this ratio of the largest to the smallest value on, an axis starts out logarithmic."""
MAX_GROUPS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line, points, or ticks at the lower edge; `num` and `num_bad` count all, also what is left out."""

    name: str
    steps: Ints
    values: Floats
    num: int
    num_bad: int
    drawn_as: str = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart."""

    title: str
    series: tuple[Series, ...]
    log: bool
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All charts of one optimizer, over the same steps."""

    optimizer: str
    first_step: int
    last_step: int
    panels: tuple[Panel, ...]
    heat: HeatMap | None


@dataclass(slots=True)
class _Track:
    """What one pass over the samples collects for an optimizer."""

    steps: list[int] = field(default_factory=list)
    scalars: list[Mapping[str, float]] = field(default_factory=list)
    val: list[tuple[int, float]] = field(default_factory=list)
    heat: HeatTable = field(default_factory=HeatTable)

    def series(self, name: str) -> tuple[Ints, Floats]:
        """Steps and values of a scalar where it was measured."""
        found = [(step, s[name]) for step, s in zip(self.steps, self.scalars, strict=True) if name in s]
        return _arrays(found)


def make_figures(run: Run, near: Mapping[str, Sequence[int]]) -> tuple[Figures, ...]:
    """Reduce a run to its charts, one set per optimizer; around the steps in `near` nothing is left out."""
    tracks: defaultdict[str, _Track] = defaultdict(_Track)
    for sample in run.samples():
        track = tracks[sample.optimizer]
        if sample.phase == "val" and "val_loss" in sample.scalars:
            track.val.append((sample.step, sample.scalars["val_loss"]))
        if sample.phase != "train":
            continue
        track.steps.append(sample.step)
        track.scalars.append(sample.scalars)
        norms = sample.col(Kind.GRAD, Column.L2)
        if norms.size:
            track.heat.add(sample.step, sample.names(Kind.GRAD), norms)
    return tuple(_figures(name, track, near.get(name, ())) for name, track in tracks.items() if track.steps)


def _figures(name: str, track: _Track, near: Sequence[int]) -> Figures:
    panels = (_loss(track, near), _norm(track, near), _rate(track, near), *_others(track, near))
    return Figures(
        optimizer=name,
        first_step=min(track.steps),
        last_step=max([*track.steps, *(step for step, _ in track.val)]),
        panels=tuple(p for p in panels if p is not None),
        heat=track.heat.finish(),
    )


def _loss(track: _Track, near: Sequence[int]) -> Panel | None:
    steps, values = track.series("loss")
    at, val = _arrays(track.val)
    series = (
        *_thinned("training", steps, values, near),
        *_thinned("validation", at, val, near, drawn_as="points"),
    )
    return Panel(title="Loss", series=series, log=is_wide(values)) if series else None


def _norm(track: _Track, near: Sequence[int]) -> Panel | None:
    steps, norms = track.series("grad_norm")
    if not steps.size:
        return None
    coefs = np.array([s.get("clip_coef", 1.0) for s in track.scalars if "grad_norm" in s])
    clipped = bool((coefs < 1.0).any())
    series = list(_thinned("before clipping" if clipped else "as it came", steps, norms, near))
    if clipped:
        with np.errstate(invalid="ignore", over="ignore"):
            after = norms * coefs
        finite = np.isfinite(after)
        series += _thinned("after clipping", steps[finite], after[finite], near)
    rejected = [step for step, s in zip(track.steps, track.scalars, strict=True) if s.get("rejected", 0.0) > 0]
    series += _thinned("update rejected", *_arrays([(step, 1.0) for step in rejected]), near, drawn_as="ticks")
    return Panel(title="Gradient norm", series=tuple(series), log=True)


def _rate(track: _Track, near: Sequence[int]) -> Panel | None:
    names = set().union(*track.scalars)  # as sets: far faster than key by key
    groups = sorted((key for key in names if key == "lr" or key.startswith("lr/")), key=lambda key: (len(key), key))
    found: dict[bytes, tuple[list[str], Ints, Floats]] = {}
    for key in groups:
        steps, rates = track.series(key)
        found.setdefault(steps.tobytes() + rates.tobytes(), ([], steps, rates))[0].append(key)
    shown = list(found.values())[:MAX_GROUPS]
    cut = any("lr_multiplier" in s for s in track.scalars)
    series: list[Series] = []
    for keys, steps, rates in shown:
        several = f"group {', '.join(k.removeprefix('lr/') for k in keys[:3])}{' …' if len(keys) > 3 else ''}"
        label = "scheduled" if len(found) == 1 else several
        series += _thinned(label, steps, rates, near)
        if cut:
            times = np.array([s.get("lr_multiplier", 1.0) for s in track.scalars if keys[0] in s])
            series += _thinned("in force" if len(found) == 1 else f"{label}, in force", steps, rates * times, near)
    if not series:
        return None
    note = f"{MAX_GROUPS} of {len(found)} different groups" if len(found) > MAX_GROUPS else ""
    every = np.concatenate([s.values for s in series])
    return Panel(title="Learning rate", series=tuple(series), log=is_wide(every), note=note)


def _others(track: _Track, near: Sequence[int]) -> list[Panel]:
    panels = []
    for name, title, label, log in (
        ("update_ratio", "Update ratio", "per step", True),
        ("scale", "Loss scale", "of the scaler", True),
    ):
        series = _thinned(label, *track.series(name), near)
        if series:
            panels.append(Panel(title=title, series=series, log=log))
    return panels


def is_wide(values: Floats) -> bool:
    """Whether these values are positive and range so far that a linear axis would hide most of them."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and bool(finite.min() > 0) and bool(finite.max() / finite.min() > WIDE)


def _thinned(name: str, steps: Ints, values: Floats, near: Sequence[int], drawn_as: str = "line") -> tuple[Series, ...]:
    if not steps.size:
        return ()
    kept = pick_points(steps, values, near)
    bad = int(values.size - np.isfinite(values).sum())
    return (
        Series(name=name, steps=steps[kept], values=values[kept], num=int(steps.size), num_bad=bad, drawn_as=drawn_as),
    )


def _arrays(points: Sequence[tuple[int, float]]) -> tuple[Ints, Floats]:
    return np.array([p[0] for p in points], np.int64), np.array([p[1] for p in points], np.float64)
