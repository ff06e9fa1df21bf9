"""What the charts of the report page show: a run reduced to series, and layers over time in one byte per cell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trimtab.core.types import ABSENT, F32, FROZEN, Column, Kind, Layout
from trimtab.record.reader import Run
from trimtab.report.downsample import Buckets, Floats, Ints, downsample

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
    metric: str = "Gradient RMS"


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
        self._steps: list[Ints] = []
        self._rows: dict[str, int] = {}
        self._pending: dict[int, tuple[tuple[str, ...], list[Ints], list[F32]]] = {}
        self._num_pending = 0
        self._base = 0
        self._norms = np.empty((0, 0), dtype=np.float32)  # column by row; column 0 starts at step base * width

    def add(self, step: int, names: tuple[str, ...], norms: F32) -> None:
        """Take one sample's norms."""
        self.add_all(np.array([step], np.int64), names, norms[None])

    def add_all(self, steps: Ints, names: tuple[str, ...], norms: F32) -> None:
        """Take the norms of several samples, one row for each."""
        # A layout names its rows with one tuple for all its samples: compared by identity, not name by name.
        _, pending, parts = self._pending.setdefault(id(names), (names, [], []))
        pending.append(steps)
        parts.append(norms)
        self._steps.append(steps)
        self._num_pending += norms.size
        if self._num_pending > _MAX_PENDING:
            self._flush()

    def finish(self, sizes: Mapping[str, int] | None = None) -> HeatMap | None:
        """All that was taken, in one byte per cell; None where nothing was. With `sizes` norms become RMS."""
        self._flush()
        if not self._steps:
            return None
        apart = np.diff(np.unique(np.concatenate(self._steps)))
        usual = float(np.quantile(apart, 0.95)) if apart.size else 1.0
        while self.width < usual and len(self._norms) > 1:  # a thinned record must not leave stripes
            self._widen()
        norms = self._norms.T
        if sizes is not None:
            root = np.sqrt([float(max(sizes.get(name, 1), 1)) for name in self._rows]).astype(np.float32)
            norms = np.where(norms > 0, norms / root[:, None], norms)
        codes, low, high = quantise(norms)
        first = self._base * self.width
        return HeatMap(names=tuple(self._rows), first_step=first, width=self.width, codes=codes, low=low, high=high)

    def _flush(self) -> None:
        for names, steps, parts in self._pending.values():
            part = parts[0] if len(parts) == 1 else np.concatenate(parts)
            self._merge(names, np.concatenate(steps), part)
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
        # One maximum per column: `reduceat` over the whole takes three times as long.
        most = np.stack([part[a:b].max(axis=0) for a, b in pairwise([*starts.tolist(), len(part)])])
        self._norms[where] = np.maximum(self._norms[where], most)

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
USUAL_UPDATE = (1e-4, 1e-2)
"""By how much of their size a step changes the weights in most trainings that learn; 1e-3 lies in the middle."""
MAX_CELLS, MAX_OTHER_CELLS = 400_000, 150_000
"""Of the heat map that is shown first, and of each other one: a page of 3,000 rows stays below 3 MB."""

PLAIN = frozenset(
    {
        "loss", "val_loss", "grad_norm", "clip_coef", "rejected", "update_ratio", "scale", "lr", "lr_multiplier",
        "scaler_skipped", "routine_overflow", "fixed", "bounded", "moving", "epoch", "clock", "gpu_memory",
        "gpu_memory_peak", "gpu_utilisation", "data_wait",
    }
)  # fmt: skip


def on_page(name: str) -> bool:
    """Whether a page needs this scalar; `read_run(folder, keep=on_page)` reads a long record faster.

    Example:
        >>> on_page("loss"), on_page("lr/0"), on_page("in_print")
        (True, True, False)
    """
    return name in PLAIN or name.startswith("lr/")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A line, points, or ticks at the lower edge, in buckets of one or more steps.

    `values` are the middles; NaN or Inf where a bucket has no finite value. `num` and `num_bad` count every value, and
    `end` is the very last one.
    `smooth` says that single values are noise: they are drawn as a band, and their middle as the line.
    """

    name: str
    steps: Ints
    last: Ints
    low: Floats
    values: Floats
    high: Floats
    bad: Ints
    num: int
    num_bad: int
    end: float
    drawn_as: str = "line"
    smooth: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart; `band` is the range that is usual, `unit` that of its axis."""

    title: str
    series: tuple[Series, ...]
    log: bool
    note: str = ""
    unit: str = ""
    band: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Another way to count than by steps: epochs, or seconds since the start; `values` never fall."""

    name: str
    steps: Ints
    values: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All charts of a run over the same steps, whatever the number of optimizers.

    `optimizer` is its name where there is only one.
    """

    optimizer: str
    first_step: int
    last_step: int
    panels: tuple[Panel, ...]
    heats: tuple[HeatMap, ...]
    axes: tuple[Axis, ...] = ()

    @property
    def heat(self) -> HeatMap | None:
        """The heat map that is shown first."""
        return self.heats[0] if self.heats else None


def make_figures(run: Run, near: Mapping[str, Sequence[int]]) -> tuple[Figures, ...]:
    """Reduce a run to its charts; around the steps in `near` nothing is left out. Empty where there is no step."""
    names = [name for name in run.optimizers if len(run.steps(name))]
    if not names:
        return ()
    close = sorted({step for steps in near.values() for step in steps})
    tracks = [_Track(run, name, name if len(names) > 1 else "", close) for name in names]
    every = [run.steps(name, phase) for name in names for phase in ("train", "val")]
    panels = (_loss(tracks), _norm(tracks), _rate(tracks), *_others(tracks))
    return (
        Figures(
            optimizer=names[0] if len(names) == 1 else "",
            first_step=min(int(s.min()) for s in every if s.size),
            last_step=max(int(s.max()) for s in every if s.size),
            panels=tuple(p for p in panels if p is not None),
            heats=make_heats(run),
            axes=tuple(_axes(run, names[0])),
        ),
    )


class _Track:
    """The series of one optimizer, under the name it has beside others."""

    def __init__(self, run: Run, optimizer: str, label: str, near: Sequence[int]) -> None:
        self._run, self.optimizer, self._label, self._near = run, optimizer, label, near

    def series(self, name: str, phase: str = "train") -> tuple[Ints, Floats]:
        """Steps and values of a scalar where it was measured."""
        return self._run.series(name, self.optimizer, phase)

    def scalars(self) -> tuple[str, ...]:
        """What was measured."""
        return self._run.scalars(self.optimizer)

    def beside(self, name: str, steps: Ints, missing: float) -> Floats:
        """The values of a scalar at these steps, the newest where a run went back; `missing` where there is none."""
        at, values = self.series(name)
        if np.array_equal(at, steps):
            return values
        known = dict(zip(at.tolist(), values.tolist(), strict=True))
        return np.array([known.get(step, missing) for step in steps.tolist()], np.float64)

    def thinned(
        self, name: str, steps: Ints, values: Floats, drawn_as: str = "line", *, smooth: bool = False, only: str = ""
    ) -> list[Series]:
        """One series, or none where there is no value; beside other optimizers its name says whose it is."""
        if not steps.size:
            return []
        label = name if not self._label else self._label if name == only else f"{self._label}, {name}"
        return [_series(label, downsample(steps, values, near=self._near), float(values[-1]), drawn_as, smooth)]


def _series(name: str, found: Buckets, end: float, drawn_as: str, smooth: bool) -> Series:
    none = np.isnan(found.middle)
    values = np.where(none, np.where(found.nan > 0, np.nan, np.inf), found.middle)
    return Series(
        name=name,
        steps=found.first,
        last=found.last,
        low=found.low,
        values=values,
        high=found.high,
        bad=found.bad,
        num=int(found.num.sum()),
        num_bad=int(found.bad.sum()),
        end=end,
        drawn_as=drawn_as,
        smooth=smooth,
    )


def _loss(tracks: Sequence[_Track]) -> Panel | None:
    series: list[Series] = []
    every: list[Floats] = []
    for track in tracks:
        steps, values = track.series("loss")
        every.append(values)
        series += track.thinned("training", steps, values, smooth=True, only="training")
    for track in tracks:  # last, so that they lie on top
        series += track.thinned("validation", *track.series("val_loss", "val"), drawn_as="points")
    return Panel(title="Loss", series=tuple(series), log=is_wide(np.concatenate(every))) if series else None


def _norm(tracks: Sequence[_Track]) -> Panel | None:
    series: list[Series] = []
    every: list[Floats] = []
    for track in tracks:
        steps, norms = track.series("grad_norm")
        if not steps.size:
            continue
        every.append(norms)
        coefs = track.beside("clip_coef", steps, 1.0)
        clipped = bool((coefs < 1.0).any())
        plain = "before clipping" if clipped else "gradient norm"
        series += track.thinned(plain, steps, norms, smooth=True, only=plain)
        if clipped:
            with np.errstate(invalid="ignore", over="ignore"):
                after = norms * coefs
            finite = np.isfinite(after)
            series += track.thinned("after clipping", steps[finite], after[finite], smooth=True)
        at, rejected = track.series("rejected")
        gone = at[rejected > 0]
        series += track.thinned("update rejected", gone, np.ones(gone.size), drawn_as="ticks")
    return Panel(title="Gradient norm", series=tuple(series), log=is_wide(np.concatenate(every))) if series else None


def _rate(tracks: Sequence[_Track]) -> Panel | None:
    series: list[Series] = []
    notes: list[str] = []
    for track in tracks:
        names = track.scalars()
        groups = sorted((key for key in names if key == "lr" or key.startswith("lr/")), key=lambda key: (len(key), key))
        found: dict[bytes, tuple[list[str], Ints, Floats]] = {}
        for key in groups:
            steps, rates = track.series(key)
            found.setdefault(steps.tobytes() + rates.tobytes(), ([], steps, rates))[0].append(key)
        for keys, steps, rates in list(found.values())[:MAX_GROUPS]:
            several = f"group {', '.join(k.removeprefix('lr/') for k in keys[:3])}{' …' if len(keys) > 3 else ''}"
            label = "scheduled" if len(found) == 1 else several
            series += track.thinned(label, steps, rates, only="scheduled")
            if "lr_multiplier" in names:
                times = track.beside("lr_multiplier", steps, 1.0)
                forced = "in force" if len(found) == 1 else f"{label}, in force"
                series += track.thinned(forced, steps, rates * times)
        if len(found) > MAX_GROUPS:
            notes.append(f"{MAX_GROUPS} of {len(found)} different groups")
    if not series:
        return None
    every = np.concatenate([s.values for s in series])
    return Panel(title="Learning rate", series=tuple(series), log=is_wide(every), note="; ".join(notes))


# scalar, chart, name in it, unit, factor to that unit, whether single values are noise
_OTHERS = (
    ("update_ratio", "Update ratio", "update / weight norm", "", 1.0, True),
    ("scale", "Loss scale", "of the scaler", "", 1.0, False),
    ("gpu_memory", "GPU memory", "in use", "GB", 1e-9, False),
    ("gpu_memory_peak", "GPU memory", "peak", "GB", 1e-9, False),
    ("gpu_utilisation", "GPU utilisation", "busy", "%", 100.0, True),
    ("data_wait", "Waiting for data", "share of the time", "%", 100.0, True),
)


def _others(tracks: Sequence[_Track]) -> list[Panel]:
    panels: dict[str, Panel] = {}
    for name, title, label, unit, factor, smooth in _OTHERS:
        series: list[Series] = []
        for track in tracks:
            steps, values = track.series(name)
            series += track.thinned(label, steps, values * factor, smooth=smooth, only=label)
        if not series:
            continue
        if title in panels:
            panels[title] = replace(panels[title], series=panels[title].series + tuple(series))
            continue
        band = USUAL_UPDATE if name == "update_ratio" else None
        log = name in ("update_ratio", "scale")
        panels[title] = Panel(title=title, series=tuple(series), log=log, unit=unit, band=band)
    return list(panels.values())


def _axes(run: Run, optimizer: str) -> Iterable[Axis]:
    """Epochs and seconds, where the record has them and they only rise."""
    for scalar, name in (("epoch", "epoch"), ("clock", "time")):
        steps, values = run.series(scalar, optimizer)
        good = np.isfinite(values)
        steps, values = steps[good], values[good]
        if steps.size < 2 or not values[-1] > values[0]:
            continue
        found = downsample(steps, np.maximum.accumulate(values))
        start = values[0] if name == "time" else 0.0
        yield Axis(name=name, steps=found.first, values=np.maximum.accumulate(found.low) - start)


def is_wide(values: Floats) -> bool:
    """Whether these values are positive and range so far that a linear axis would hide most of them."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and bool(finite.min() > 0) and float(finite.max()) > WIDE * float(finite.min())


class _Rows:
    """Where in the tables of one layout the numbers of the heat maps are."""

    def __init__(self, layout: Layout) -> None:
        self.names = layout.named(Kind.GRAD)
        self.grads, self.weights, self.updates = (layout.rows(kind) for kind in (Kind.GRAD, Kind.WEIGHT, Kind.UPDATE))
        self.l2 = layout.columns.index(Column.L2) if Column.L2 in layout.columns else None
        self.zeros = layout.columns.index(Column.ZERO_FRAC) if Column.ZERO_FRAC in layout.columns else None
        self.weight_names = layout.named(Kind.WEIGHT)
        self.has_updates = bool(self.weight_names) and layout.named(Kind.UPDATE) == self.weight_names


def make_heats(run: Run) -> tuple[HeatMap, ...]:
    """Layers over time: gradient RMS, and where they were measured update ratio, weight norm and share of zeros."""
    num_rows = max((len(layout.named(Kind.GRAD)) for layout in run.layouts.values()), default=0)
    most, other = _stretches(num_rows, MAX_CELLS, MAX_STRETCHES), _stretches(num_rows, MAX_OTHER_CELLS, 256)
    grads, ratios, weights, zeros = HeatTable(most), HeatTable(other), HeatTable(other), HeatTable(other)
    known: dict[int, _Rows] = {}  # by identity: a layout is compared name by name otherwise
    sizes: dict[str, int] = {}
    for steps, layout, tables in run.table_blocks():
        rows = known.get(id(layout))
        if rows is None:
            rows = known[id(layout)] = _Rows(layout)
            sizes |= dict(zip(rows.names, layout.numel[rows.grads], strict=True))
        if rows.l2 is None:
            continue
        if rows.names:
            grads.add_all(steps, rows.names, tables[:, rows.grads, rows.l2])
            if rows.zeros is not None:
                zeros.add_all(steps, rows.names, _measured(tables[:, rows.grads, rows.zeros]))
        if rows.weight_names:
            norms = tables[:, rows.weights, rows.l2]
            weights.add_all(steps, rows.weight_names, norms)
            if rows.has_updates:
                ratios.add_all(steps, rows.weight_names, _ratio(tables[:, rows.updates, rows.l2], norms))
    found = (
        ("Gradient RMS", grads.finish(sizes)),
        ("Update ratio", ratios.finish()),
        ("Weight norm", weights.finish()),
        ("Zero fraction", zeros.finish()),
    )
    return tuple(replace(heat, metric=metric) for metric, heat in found if heat is not None)


def _stretches(num_rows: int, cells: int, most: int) -> int:
    return max(min(cells // max(num_rows, 1), most), 64)


def _measured(values: F32) -> F32:
    """NaN in this column says that it was not measured."""
    return np.where(np.isnan(values), _NOT_MEASURED, values).astype(np.float32)


def _ratio(updates: F32, weights: F32) -> F32:
    """Updates over weights; what is no norm stays what it says."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.where((updates < 0) | (weights <= 0), np.minimum(updates, _NOT_MEASURED), updates / weights)
    return ratio.astype(np.float32)
