"""Two runs side by side: which settings differ, how loss and norms went at the same point, what was found in which."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab.core.errors import InputError
from trimtab.core.printable import brief
from trimtab.record.reader import Run
from trimtab.report.chart import tail_median
from trimtab.report.downsample import Floats
from trimtab.report.drawing import Line, Picture
from trimtab.report.headline import make_headline
from trimtab.report.summary import Summary, Track, summarise

AXES = ("step", "epoch")
NUM_LAST = 10
"""Values whose median stands for where a curve is: one batch is mostly noise."""
_CURVES = (("loss", "loss", "train"), ("val_loss", "validation loss", "val"), ("grad_norm", "gradient norm", "train"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting or a fact that the two runs do not share; empty where a run does not have it."""

    name: str
    a: str
    b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """One number of both runs."""

    name: str
    a: float | None
    b: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One rule: how often it spoke in each run, and at which step first (None where it did not)."""

    code: str
    name: str
    num_a: int
    num_b: int
    first_a: int | None
    first_b: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlay:
    """One scalar of one optimizer in both runs, over steps or epochs."""

    title: str
    optimizer: str
    a: tuple[Floats, Floats]
    b: tuple[Floats, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All that differs between two runs; `same_until` is the first step at which their losses differ."""

    names: tuple[str, str]
    summaries: tuple[Summary, Summary]
    headlines: tuple[str, str]
    axis: str
    common: float | None
    settings: tuple[Difference, ...]
    facts: tuple[Difference, ...]
    measures: tuple[Measure, ...]
    found: tuple[Found, ...]
    overlays: tuple[Overlay, ...]
    same_until: int | None
    verdict: str


def compare_runs(a: Run, b: Run, *, by: str = "step", epoch_steps: Sequence[int] = ()) -> Comparison:
    """Compare two runs, aligned by step or by epoch.

    For epochs a record must hold the number `epoch`, or you say how many steps one has (`epoch_steps`: one number for
    both, or one each).
    """
    if by not in AXES:
        raise InputError(f"runs cannot be aligned by {by!r}; expected one of {', '.join(AXES)}")
    runs = (a, b)
    lengths = [*epoch_steps, *epoch_steps][:2] if len(epoch_steps) < 2 else list(epoch_steps[:2])
    both = tuple(_Axis(run, by, lengths[i] if lengths else None) for i, run in enumerate(runs))
    summaries = (summarise(a), summarise(b))
    overlays = tuple(_overlays(runs, both))
    losses = next((o for o in overlays if o.title == "loss"), None)
    common = _common(losses)
    measures = tuple(_measures(summaries, losses, common, by))
    measures = (*measures, *_rates(runs))
    names = _names(runs)
    return Comparison(
        names=names,
        summaries=summaries,
        headlines=(make_headline(summaries[0]).sentence(), make_headline(summaries[1]).sentence()),
        axis=by,
        common=common,
        settings=tuple(_differences(*(_settings(run) for run in runs))),
        facts=tuple(_differences(*(_facts(run) for run in runs))),
        measures=measures,
        found=tuple(_found(runs)),
        overlays=overlays,
        same_until=_same_until(losses) if by == "step" else None,
        verdict=_verdict(names, losses, common, by),
    )


def _names(runs: tuple[Run, Run]) -> tuple[str, str]:
    names = [brief(run.folder.resolve().name, 60) for run in runs]
    if names[0] == names[1]:
        names = [brief("/".join(run.folder.resolve().parts[-2:]), 60) for run in runs]
    return (names[0], names[1]) if names[0] != names[1] else (f"A: {names[0]}", f"B: {names[1]}")


class _Axis:
    """Where each step of a run lies on the common axis."""

    def __init__(self, run: Run, by: str, epoch_steps: int | None) -> None:
        self._by, self._length = by, epoch_steps
        self._epochs: dict[str, tuple[Floats, Floats]] = {}
        if by == "epoch" and epoch_steps is None:
            for optimizer in run.optimizers:
                steps, epochs = run.series("epoch", optimizer=optimizer)
                if not len(steps):
                    raise InputError(
                        f"{run.folder} does not say which step belongs to which epoch; pass --epoch-steps N, the steps "
                        "of one epoch (or N,M for two runs), or align by step"
                    )
                self._epochs[optimizer] = _begins(steps, epochs)

    def place(self, steps: np.ndarray[tuple[int, ...], np.dtype[np.int64]], optimizer: str) -> Floats:
        if self._by == "step":
            return steps.astype(np.float64)
        if self._length is not None:
            return steps / float(self._length)
        return np.interp(steps, *self._epochs[optimizer])


def _begins(steps: np.ndarray[tuple[int, ...], np.dtype[np.int64]], epochs: Floats) -> tuple[Floats, Floats]:
    """Between which steps an epoch lies; its steps are spread evenly over it."""
    numbers, firsts = np.unique(epochs[np.isfinite(epochs)], return_index=True)
    at = steps[np.isfinite(epochs)][firsts].astype(np.float64)
    typical = float(np.median(np.diff(at))) if len(at) > 1 else float(steps.max() - steps.min() + 1)
    last = max(float(steps.max()) + 1.0, at[-1] + typical)
    return np.append(at, last), np.append(numbers, numbers[-1] + 1.0)


def _overlays(runs: tuple[Run, Run], axes: tuple[_Axis, ...]) -> Iterator[Overlay]:
    for optimizer in dict.fromkeys([*runs[0].optimizers, *runs[1].optimizers]):
        for name, title, phase in _CURVES:
            sides = []
            for run, axis in zip(runs, axes, strict=True):
                steps, values = run.series(name, optimizer=optimizer, phase=phase)
                at = axis.place(steps, optimizer) if len(steps) else np.empty(0)
                order = np.argsort(at, kind="stable")
                sides.append((at[order], values[order]))
            if len(sides[0][0]) or len(sides[1][0]):
                yield Overlay(title=title, optimizer=optimizer, a=sides[0], b=sides[1])


def _common(losses: Overlay | None) -> float | None:
    if losses is None or not len(losses.a[0]) or not len(losses.b[0]):
        return None
    return min(float(losses.a[0][-1]), float(losses.b[0][-1]))


def _level(side: tuple[Floats, Floats], until: float) -> float:
    """Where a curve is at a point; NaN where its last value there is not finite."""
    at, values = side
    before = values[at <= until]
    return tail_median(before, NUM_LAST) if before.size and math.isfinite(before[-1]) else math.nan


def _measures(
    summaries: tuple[Summary, Summary], losses: Overlay | None, common: float | None, by: str
) -> Iterator[Measure]:
    if losses is not None and common is not None:
        yield Measure(name=f"loss at {by} {common:,.6g}", a=_level(losses.a, common), b=_level(losses.b, common))
    for number in range(max(len(s.tracks) for s in summaries)):
        tracks = [s.tracks[number] if number < len(s.tracks) else None for s in summaries]
        label = next((t.optimizer for t in tracks if t is not None), "")
        lead = f"{brief(label, 20)}: " if label else ""
        for name, (a, b) in _numbers(tracks):
            if a is not None or b is not None:
                yield Measure(name=lead + name, a=a, b=b)
    one, other = summaries
    yield Measure(name="updates rejected", a=one.num_rejected, b=other.num_rejected)
    yield Measure(name="incidents", a=len(one.incidents), b=len(other.incidents))


def _rates(runs: tuple[Run, Run]) -> Iterator[Measure]:
    """The learning rates at both ends: not a setting of ours, and yet what runs differ in most often."""
    for optimizer in dict.fromkeys([*runs[0].optimizers, *runs[1].optimizers]):
        lead = f"{brief(optimizer, 20)}: " if optimizer else ""
        ends = []
        for run in runs:
            _, rates = run.series("lr/0", optimizer=optimizer)
            ends.append((float(rates[0]), float(rates[-1])) if len(rates) else (None, None))
        for i, when in enumerate(("first", "last")):
            if ends[0][i] is not None or ends[1][i] is not None:
                yield Measure(name=f"{lead}learning rate, {when}", a=ends[0][i], b=ends[1][i])


def _numbers(tracks: Sequence[Track | None]) -> Iterator[tuple[str, tuple[float | None, float | None]]]:
    rows: list[dict[str, float | None]] = []
    for track in tracks:
        if track is None:
            rows.append({})
            continue
        loss, val, norm = track.loss, track.val_loss, track.grad_norm
        rows.append(
            {
                "steps": float(track.num_steps),
                "last loss": loss.ended if loss else None,
                "lowest loss": loss.lowest if loss else None,
                "best validation loss": val.lowest if val else None,
                "gradient norm, median": norm.median if norm else None,
                "gradient norm, largest": norm.highest if norm else None,
                "steps clipped, %": None if track.clipped_frac is None else 100 * track.clipped_frac,
            }
        )
    for name in dict.fromkeys(name for row in rows for name in row):
        yield name, (rows[0].get(name), rows[1].get(name))


def _settings(run: Run) -> dict[str, str]:
    return _flat(run.info.config) if run.info is not None else {}


def _facts(run: Run) -> dict[str, str]:
    info = run.info
    if info is None:
        return {}
    facts = {"model": info.model, "parameters": f"{info.num_parameters:,}", "script": info.script}
    facts["optimizers"] = ", ".join(name for name in info.optimizers if name)
    return facts | {f"version of {name}": str(value) for name, value in info.versions.items()}


def _flat(config: Mapping[str, object], lead: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= _flat(value, f"{lead}{key}.") if isinstance(value, Mapping) else {f"{lead}{key}": _shown(value)}
    return flat


def _shown(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else "not set" if value is None else str(value)


def _differences(a: Mapping[str, str], b: Mapping[str, str]) -> Iterator[Difference]:
    for name in dict.fromkeys([*a, *b]):
        if a.get(name, "") != b.get(name, ""):
            yield Difference(name=brief(name, 80), a=brief(a.get(name, ""), 120), b=brief(b.get(name, ""), 120))


def _found(runs: tuple[Run, Run]) -> Iterator[Found]:
    names: dict[str, str] = {}
    steps: tuple[dict[str, list[int]], dict[str, list[int]]] = ({}, {})
    for run, by_code in zip(runs, steps, strict=True):
        for finding in run.findings:
            names.setdefault(finding.code, finding.name)
            by_code.setdefault(finding.code, []).append(finding.step)
    for code, name in names.items():
        a, b = (by_code.get(code, []) for by_code in steps)
        yield Found(
            code=brief(code, 20),
            name=brief(name, 60),
            num_a=len(a),
            num_b=len(b),
            first_a=min(a, default=None),
            first_b=min(b, default=None),
        )


def _same_until(losses: Overlay | None) -> int | None:
    """The first step at which the losses differ; None where they never do, or where there is nothing to compare."""
    if losses is None:
        return None
    (at_a, a), (at_b, b) = losses.a, losses.b
    num = min(len(a), len(b))
    same = (at_a[:num] == at_b[:num]) & ((a[:num] == b[:num]) | (np.isnan(a[:num]) & np.isnan(b[:num])))
    apart = np.flatnonzero(~same)
    return int(at_a[apart[0]]) if apart.size else None


def _verdict(names: tuple[str, str], losses: Overlay | None, common: float | None, by: str) -> str:
    if losses is None or common is None:
        return "One of the runs has no loss on record: only settings and findings can be compared."
    a, b = _level(losses.a, common), _level(losses.b, common)
    where = f"At {by} {common:,.6g}, the last that both reached"
    if math.isnan(a) or math.isnan(b):
        bad = " and ".join(name for name, level in zip(names, (a, b), strict=True) if math.isnan(level))
        return f"{where}, the loss of {bad} is not finite."
    spread = max(_noise(losses.a, common), _noise(losses.b, common))
    if abs(a - b) <= spread:
        return f"{where}, the losses are alike: {a:.3g} and {b:.3g} (one step differs from the next by {spread:.2g})."
    lower, better, other = (names[0], a, b) if a < b else (names[1], b, a)
    return f"{where}, {lower} has the lower loss: {better:.3g} against {other:.3g}."


def _noise(side: tuple[Floats, Floats], until: float) -> float:
    """How much a loss differs from one step to the next around a point; two runs that differ less are alike."""
    values = side[1][side[0] <= until]
    values = values[np.isfinite(values)][-5 * NUM_LAST :]
    with np.errstate(over="ignore"):  # of values near the largest float the difference is beyond it
        return float(np.median(np.abs(np.diff(values)))) if values.size > 2 else 0.0


def pictures(found: Comparison) -> list[Picture]:
    """The curves of both runs on common axes."""
    return [
        Picture(
            title=f"{brief(o.optimizer, 20)}: {o.title}" if o.optimizer else o.title,
            lines=tuple(
                Line(name=name, x=side[0], values=side[1], as_points=o.title == "validation loss" and len(side[0]) < 50)
                for name, side in zip(found.names, (o.a, o.b), strict=True)
                if len(side[0])
            ),
            x_title=found.axis,
        )
        for o in found.overlays
    ]


def default_page(found: tuple[Path, Path]) -> Path:
    """Where the page goes unless somebody says so: beside the first run."""
    return found[0].parent / f"compare-{found[0].name}-{found[1].name}.html"
