"""What a rule may look at, the newest sample and bounded history from before it; and how a rule words what it found."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from math import isfinite
from statistics import median
from typing import Any

from trimtab.core.schedule import Schedule, rates_of
from trimtab.core.stats.level import Cusum, Level
from trimtab.core.stats.row_history import RowBaseline, RowRuns
from trimtab.core.stats.series import Series
from trimtab.core.types import Column, Finding, Kind, Rule, Sample

TRACKED = ("loss", "grad_norm", "val_loss", "update_ratio", "in_rms")
LEVELS = ("loss", "grad_norm")
ROWS_EVERY = 10
"""The baseline of single rows only attributes alarms: it need not see every step."""
MAX_LEFT_OUT = 16
"""So many alarming samples in a row stay out of the history; after that they are the new normal."""
NUM_PAST = 64
MIN_DRIFT = 20
MIN_CALM = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Earlier:
    """What one scalar really was before the newest sample: this is what a message quotes.

    The histories that detectors compare with leave alarming samples out, and levels are medians; neither is what the
    reader finds in the log. `usual` (the median) and `highest` are over the `num` finite values of the last
    `num_steps` steps (at most 64), alarms included. `last`, `first` and `lowest` are the newest, the oldest and the
    smallest finite value of the whole run, with their steps. Numbers that are not known are NaN, steps -1.
    """

    num: int
    num_steps: int
    usual: float
    highest: float
    last: float
    last_step: int
    first: float
    first_step: int
    lowest: float
    lowest_step: int

    def range(self) -> str:
        """For a message: `usually 0.19, at most 1.5 in the last 64 steps`; empty where nothing is known."""
        if not self.num:
            return ""
        span = (
            f"the last {self.num_steps}" if self.num == self.num_steps else f"{self.num} of the last {self.num_steps}"
        )
        return f"usually {self.usual:.4g}, at most {self.highest:.4g} in {span} steps"


@dataclass(slots=True)
class _Ends:
    """The first, the newest and the smallest finite value of a scalar, each with its step."""

    first: float = math.nan
    first_step: int = -1
    last: float = math.nan
    last_step: int = -1
    lowest: float = math.nan
    lowest_step: int = -1

    def push(self, value: float, step: int) -> None:
        if self.first_step < 0:
            self.first, self.first_step = value, step
        self.last, self.last_step = value, step
        if not value >= self.lowest:
            self.lowest, self.lowest_step = value, step

    def push_all(self, values: list[float], steps: list[int]) -> None:
        if self.first_step < 0:
            self.first, self.first_step = values[0], steps[0]
        self.last, self.last_step = values[-1], steps[-1]
        value = min(values)
        if not value >= self.lowest:
            self.lowest, self.lowest_step = value, steps[values.index(value)]  # of equal ones the first, as one by one

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


class Window:
    """The newest sample beside the history of the samples before it. Memory does not grow with the run."""

    def __init__(self) -> None:
        self._now: Sample | None = None
        self._series = {name: Series() for name in TRACKED}
        self._levels = {name: Level() for name in LEVELS}
        self._left_out = 0
        self._ends: dict[str, _Ends] = {}
        self.past: deque[Mapping[str, float]] = deque(maxlen=NUM_PAST)
        self.schedule = Schedule()
        self.drift = Cusum()
        self.gradients = RowBaseline()
        self.weights = RowBaseline()
        self.runs = RowRuns()

    @property
    def now(self) -> Sample:
        """The sample being judged."""
        if self._now is None:
            raise LookupError("the window is empty: look() at a sample first")
        return self._now

    def scalar(self, name: str) -> float | None:
        """A scalar of the newest sample, None where it was not measured."""
        return None if self._now is None else self._now.scalars.get(name)

    def history(self, name: str) -> Series:
        """What a scalar was before the newest sample; samples that raised an alarm are left out at first."""
        return self._series[name]

    def level(self, name: str) -> Level:
        """Where a scalar stood before the newest sample, alarms or not."""
        return self._levels[name]

    def earlier(self, name: str) -> Earlier:
        """What a tracked scalar was in the steps before the newest sample, alarming ones included."""
        values = [v for scalars in self.past if (v := scalars.get(name)) is not None]
        ends = self._ends.get(name, _Ends())
        return Earlier(
            num=len(values),
            num_steps=len(self.past),
            usual=_median(values),
            highest=max(values, default=math.nan),
            last=ends.last,
            last_step=ends.last_step,
            first=ends.first,
            first_step=ends.first_step,
            lowest=ends.lowest,
            lowest_step=ends.lowest_step,
        )

    def last(self, name: str, num: int) -> list[float]:
        """A scalar in the last `num` training samples, the newest included, oldest first; finite values only."""
        past = self.past
        earlier = islice(past, max(len(past) - num + 1, 0), None)  # finite already
        values = [v for scalars in earlier if (v := scalars.get(name)) is not None]
        now = self.now.scalars.get(name)
        return values if now is None or not isfinite(now) else [*values, now]

    def streak(self, name: str, num: int) -> bool:
        """Whether a scalar is set in the newest sample and in the `num - 1` before it."""
        if not self.now.scalars.get(name) or len(self.past) < num - 1:
            return False
        return all(self.past[-i].get(name) for i in range(1, num))

    def calm(self) -> bool:
        """Whether the newest sample is so ordinary that no rule about single values can have anything to say.

        Nothing above what was seen lately, no change of rates or rows, no drift: true for nearly every step, and a
        fraction of the cost of asking them all.
        """
        sample, past = self.now, self.past
        scalars = sample.scalars
        loss, norm = scalars.get("loss"), scalars.get("grad_norm")
        if norm is None or len(past) < MIN_CALM or sample.phase != "train":
            return False
        series, schedule = self._series, self.schedule
        if loss is None:
            if len(self._levels["loss"]):  # else nobody ever tells it
                return False
        elif not (-math.inf < loss <= series["loss"].recent_max and loss != 0):
            return False
        if not 0 < norm <= series["grad_norm"].recent_max:
            return False
        if not self.runs.calm or self.drift.alarmed or schedule.idle_steps or schedule.jumped_at >= 0:
            return False
        last = past[-1]
        if scalars.get("in_print", -1.0) == last.get("in_print") or rates_of(scalars) != schedule.rates:
            return False
        size = scalars.get("in_rms")
        if size is not None and not size <= series["in_rms"].recent_max:
            return False
        return not sample.layout.has_weight_norms

    def look(self, sample: Sample) -> None:
        """Make `sample` the newest one. It joins the history only with `absorb`."""
        self._now = sample

    def absorb(self, *, alarming: bool) -> None:
        """Let the newest sample into the history, unless it is alarming and the alarm is young."""
        sample = self.now
        scalars, ends, step = sample.scalars, self._ends, sample.step
        known = [(name, value) for name in TRACKED if (value := scalars.get(name)) is not None and isfinite(value)]
        for name, value in known:
            if name not in ends:
                ends[name] = _Ends()
            ends[name].push(value, step)
        if sample.phase == "train":
            self._follow(sample)
        if alarming and self._left_out < MAX_LEFT_OUT:
            self._left_out += 1
            return
        if not alarming:
            self._left_out = 0
        series = self._series
        for name, value in known:
            series[name].push(value)
        if step % ROWS_EVERY == 0 and sample.layout.has_grad_norms:
            self.gradients.push(sample.names(Kind.GRAD), sample.col(Kind.GRAD, Column.L2))

    def absorb_calm(self, samples: list[Sample]) -> None:
        """The same for steps that the screen let pass, together: every row with a gradient, rates unchanged."""
        self._now, self._left_out = samples[-1], 0
        steps, facts = [sample.step for sample in samples], [sample.scalars for sample in samples]
        for name, series in self._series.items():
            values, at = [v for s in facts if (v := s.get(name)) is not None], steps
            if len(values) < len(steps) or not isfinite(sum(values)):
                at = [step for step, s in zip(steps, facts, strict=True) if isfinite(s.get(name, math.nan))]
                values = [v for v in values if isfinite(v)]
            if values:
                if name not in self._ends:
                    self._ends[name] = _Ends()
                self._ends[name].push_all(values, at)
                series.push_all(values)
        self.schedule.absorb_same(len(samples), sized=any("batch_size" in scalars for scalars in facts))
        loss_level, norm_level = self._levels["loss"], self._levels["grad_norm"]
        for step, scalars in zip(steps, facts, strict=True):
            if not isfinite(sum(scalars.values())):  # a sum that is finite has finite parts only
                scalars = {name: value for name, value in scalars.items() if isfinite(value)}
            self.past.append(scalars)
            if (loss := scalars.get("loss")) is not None:
                if len(loss_level) >= MIN_DRIFT and isfinite(loss_level.best):
                    self._climb(loss, loss_level, step)
                loss_level.push(loss)
            if (norm := scalars.get("grad_norm")) is not None:
                norm_level.push(norm)
        for sample in samples:
            if sample.step % ROWS_EVERY == 0 and sample.layout.has_grad_norms:
                self.gradients.push(sample.names(Kind.GRAD), sample.col(Kind.GRAD, Column.L2))
        self.runs.push_real(samples[-1].names(Kind.GRAD), len(samples))

    def _follow(self, sample: Sample) -> None:
        """What is remembered of every step, alarming or not."""
        scalars = sample.scalars
        if not all(map(isfinite, scalars.values())):  # nothing that is remembered can be poisoned
            scalars = {name: value for name, value in scalars.items() if math.isfinite(value)}
        self.past.append(scalars)
        self.schedule.absorb(sample)
        self._drift(sample)
        for name, level in self._levels.items():
            value = sample.scalars.get(name)
            if value is not None:
                level.push(value)
        if sample.layout.has_grad_norms:
            self.runs.push(sample.names(Kind.GRAD), sample.col(Kind.GRAD, Column.L2))
        if sample.layout.has_weight_norms:
            self.weights.push(sample.names(Kind.WEIGHT), sample.col(Kind.WEIGHT, Column.L2))

    def _drift(self, sample: Sample) -> None:
        """Add up how far the loss lies above the best level it ever had. A change the loop made starts it over."""
        loss, level = sample.scalars.get("loss"), self._levels["loss"]
        if loss is None or len(level) < MIN_DRIFT or not math.isfinite(level.best):
            return
        schedule = self.schedule
        if sample.step == schedule.resized_at:  # a loss may depend on the size of the batch: all of it is new
            self._levels["loss"] = Level()
            self.drift.reset()
            return
        if sample.step == schedule.raised_at:
            level.rebase()
            self.drift.reset()
        self._climb(loss, level, sample.step)

    def _climb(self, loss: float, level: Level, step: int) -> None:
        noise = max(level.calm_noise, 1e-3 * abs(level.best), 1e-12)
        self.drift.push((loss - level.best) / noise, step)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {
            "series": {name: s.state_dict() for name, s in self._series.items()},
            "levels": {name: level.state_dict() for name, level in self._levels.items()},
            "gradients": self.gradients.state_dict(),
            "weights": self.weights.state_dict(),
            "runs": self.runs.state_dict(),
            "schedule": self.schedule.state_dict(),
            "drift": self.drift.state_dict(),
            "past": [dict(scalars) for scalars in self.past],
            "left_out": self._left_out,
            "ends": {name: ends.state_dict() for name, ends in self._ends.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._series = {n: Series.from_state(state["series"][n]) if n in state["series"] else Series() for n in TRACKED}
        self._levels = {n: Level.from_state(state["levels"][n]) for n in LEVELS}
        self.gradients = RowBaseline.from_state(state["gradients"])
        self.weights = RowBaseline.from_state(state["weights"])
        self.runs = RowRuns.from_state(state["runs"])
        self.schedule = Schedule.from_state(state["schedule"])
        self.drift = Cusum.from_state(state["drift"])
        self.past = deque(({k: float(v) for k, v in s.items()} for s in state["past"]), maxlen=NUM_PAST)
        self._left_out = int(state["left_out"])
        self._ends = {name: _Ends(**ends) for name, ends in state.get("ends", {}).items()}


def _median(values: list[float]) -> float:
    """The middle one of them, as `statistics.median` gives it; NaN where there is none."""
    return median(values) if values else math.nan


def found(rule: Rule, window: Window, message: str, subject: tuple[str, ...] = (), **evidence: float | None) -> Finding:
    """A finding of `rule` about the newest sample; evidence that is None is left out."""
    return Finding(
        code=rule.code,
        name=rule.name,
        step=window.now.step,
        severity=rule.severity,
        message=message,
        subject=subject,
        evidence={key: float(value) for key, value in evidence.items() if value is not None},
    )


def listed(names: tuple[str, ...], num: float | None = None) -> str:
    """Names for a sentence: the first few, and how many more there are."""
    total = int(num) if num is not None else len(names)
    head = ", ".join(names[:3])
    return f"{head} and {total - 3} more" if total > 3 and len(names) >= 3 else head


def of_ranks(ranks: tuple[str, ...]) -> str:
    """For a sentence: whose it is, where several processes train together and not all of them are meant."""
    return f" on {listed(ranks)}" if ranks else ""
