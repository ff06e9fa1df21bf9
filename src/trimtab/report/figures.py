"""What the charts of the report page show: a run reduced to series and a heat map. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from trimtab.core.types import Column, Kind
from trimtab.record.reader import Run
from trimtab.report.heat import HeatMap, HeatTable
from trimtab.report.thinning import Floats, Ints, pick_points

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
