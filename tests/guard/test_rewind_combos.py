"""Whole runs that go back: with a scaler, two optimizers, averages, schedules, accumulation; from memory and disk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.guard.test_rewind import data, same
from trimtab import Guard, TrainingStopped
from trimtab.core.types import Outcome

FAULT = 70
SOURCES = {"memory": "from memory", "disk": "from the checkpoint step-00000060, verified"}


@dataclass
class Kept:
    """A sink that remembers."""

    records: list[Any] = field(default_factory=list)

    def write(self, record: Any) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass

    def outcomes(self, kind: str) -> list[Outcome]:
        """What was done, without what was told of it later."""
        found = [r for r in self.records if isinstance(r, Outcome) and r.action.kind == kind]
        return [r for r in found if "later:" not in r.detail]


@dataclass
class Course:
    """One run: everything that has a state, and what it was before every step."""

    folder: Path
    source: str = "memory"
    scaled: bool = False
    pair: bool = False
    averaged: bool = False
    accumulate: int = 1
    schedule: Callable[[Any], Any] | None = None
    policy: dict[str, Any] = field(default_factory=dict)
    lag: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
        params = [list(self.model[:2].parameters()), list(self.model[3].parameters())]
        groups = params if self.pair else [params[0] + params[1]]
        self.optimizers = [torch.optim.Adam(group, lr=1e-2) for group in groups]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if self.scaled else None
        self.ema = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True) if self.averaged else None
        self.schedulers = [self.schedule(o) for o in self.optimizers] if self.schedule else []
        self.sink, self.used, self.states, self.after = Kept(), [], {}, {}
        on_disk = self.source == "disk"
        policy = self.policy | ({"ring_bytes": 1} if on_disk else {})
        settings = {"checkpoint_every": 10, "checkpoint_on_signal": False, "policy": policy, "lag": self.lag}
        self.guard = Guard(
            self.model,
            self.optimizers,
            settings,
            mode="act",
            run_dir=False,
            scaler=self.scaler,
            ema=self.ema,
            scheduler=self.schedulers or None,
            checkpoint=self.folder if on_disk else None,
            sinks=[self.sink],
        )
        self.optimizers[0].register_step_pre_hook(lambda o, *_: self.used.append(o.param_groups[0]["lr"]))

    def state(self) -> Any:
        return copy.deepcopy(
            [
                self.model.state_dict(),
                {} if self.ema is None else self.ema.state_dict(),
                *(o.state_dict()["state"] for o in self.optimizers),
            ]
        )

    def run(self, steps: range, fault: Callable[[Course, int], float] | None = None) -> None:
        for step in steps:
            if step == 60:
                self.states[step] = self.state()
            factor = fault(self, step) if fault is not None else 1.0
            for part in range(self.accumulate):
                x, y = data(step * self.accumulate + part)
                loss = nn.functional.mse_loss(self.model(x), factor * y) / self.accumulate
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
                if part < self.accumulate - 1:
                    self.guard.observe(loss=loss)
            self.guard.step(loss, optimizer="all")
            if step in (59, steps[-1]):
                self.now = self.after[step + 1] = self.state()
            if self.ema is not None:
                self.ema.update_parameters(self.model)
            for one in self.schedulers:
                one.step()
            for one in self.optimizers:
                one.zero_grad()


def layer_times_1000(course: Course, step: int) -> float:
    if step == FAULT:
        with torch.no_grad():
            course.model[0].weight.mul_(1e3)
    return 1.0


def other_targets(course: Course, step: int) -> float:
    return 400.0 if step == FAULT else 1.0


COMBOS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaler": {"scaled": True},
    "two optimizers": {"pair": True},
    "average": {"averaged": True},
    "accumulation": {"accumulate": 4},
    "schedule": {"schedule": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=200)},
    "all of it": {
        "scaled": True,
        "pair": True,
        "averaged": True,
        "accumulate": 4,
        "schedule": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.995**s),
    },
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("combo", COMBOS)
def test_a_layer_gone_wrong_is_taken_back_and_the_run_goes_on(tmp_path: Path, combo: str, source: str) -> None:
    course = Course(tmp_path, source, **COMBOS[combo])
    course.run(range(FAULT + 1), layer_times_1000)
    kept = course.states if source == "disk" else course.after  # in memory: before it is averaged
    assert same(course.now, kept[60])
    assert [one.last_epoch for one in course.schedulers] == [FAULT + 1] * len(course.schedulers)  # schedules go on
    found = len(course.guard.findings)
    course.run(range(FAULT + 1, FAULT + 25))
    course.guard.close()
    assert len(course.guard.findings) == found  # nobody alarms at what was done
    (outcome,) = course.sink.outcomes("rewind")
    assert outcome.applied
    assert f"those after step 59 again, {SOURCES[source]}" in outcome.detail
    loss = (course.model(data(500)[0]) - data(500)[1]).square().mean()
    assert float(loss.detach()) < 5.0


@pytest.mark.parametrize("source", SOURCES)
def test_gradients_of_weights_that_are_gone_are_not_applied_by_the_next_optimizer(tmp_path: Path, source: str) -> None:
    course = Course(tmp_path, source, pair=True)
    course.run(range(FAULT + 1), layer_times_1000)
    assert same(course.now, course.states[60])  # though the second optimizer stepped after the first had gone back
    assert course.guard.rejected == 1
    course.run(range(FAULT + 1, FAULT + 3))
    assert course.guard.rejected == 1
    assert not same(course.now, course.states[60])
    course.guard.close()


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=200, pct_start=0.1),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.995**s),
}


@pytest.mark.parametrize(
    ("schedule", "source", "scaled"),
    [
        ("one cycle", "memory", False),
        ("lambda", "disk", False),
        ("one cycle", "disk", True),
        ("lambda", "memory", True),
    ],
)
def test_the_cut_after_going_back_outlives_every_step_of_a_schedule(
    tmp_path: Path, schedule: str, source: str, scaled: bool
) -> None:
    course = Course(tmp_path, source, scaled=scaled, schedule=SCHEDULES[schedule])
    planned = []
    for step in range(FAULT + 60):
        planned.append(course.optimizers[0].param_groups[0]["lr"])
        course.run(range(step, step + 1), other_targets)
    course.guard.close()
    assert len(course.sink.outcomes("rewind")) == len(course.sink.outcomes("cut_lr")) == 1
    share = [used / plan for used, plan in zip(course.used, planned, strict=True)]
    assert share[: FAULT + 1] == pytest.approx([1.0] * (FAULT + 1))
    assert share[FAULT + 1 : FAULT + 20] == pytest.approx([0.5] * 19)
    assert 0.5 < share[FAULT + 30] < share[FAULT + 31] < 1.0  # then it comes back
    fresh = SCHEDULES[schedule](torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=1e-2))
    want = []
    for _ in planned:
        want.append(fresh.get_last_lr()[0])
        fresh.optimizer.step()
        fresh.step()
    assert planned == pytest.approx(want)  # the schedule itself saw nothing of it


# -- bounds ------------------------------------------------------------------------------------------------------------


def other_targets_twice(course: Course, step: int) -> float:
    return 400.0 if step in (FAULT, FAULT + 150) else 1.0


@pytest.mark.parametrize(("budget", "times"), [(4, 2), (3, 2), (2, 1)])
def test_the_budget_bounds_what_is_done_in_a_run(tmp_path: Path, budget: int, times: int) -> None:
    course = Course(tmp_path, policy={"budget": budget})
    course.run(range(FAULT + 160), other_targets_twice)
    course.guard.close()
    assert len([o for o in course.sink.outcomes("rewind") if o.applied]) == times
    assert len([o for k in ("rewind", "cut_lr") for o in course.sink.outcomes(k)]) <= budget


def other_targets_for_good(course: Course, step: int) -> float:
    return 400.0 if step >= FAULT else 1.0


@pytest.mark.parametrize(
    ("source", "deeper"), [("memory", {1: "49", 2: "39", 3: "29"}), ("disk", dict.fromkeys((1, 2, 3), "49"))]
)
def test_going_back_that_does_not_help_goes_further_back_cuts_deeper_and_then_gives_up(
    tmp_path: Path, source: str, deeper: dict[int, str]
) -> None:
    course = Course(tmp_path, source)
    with pytest.raises(TrainingStopped, match="diverging-loss"):
        course.run(
            range(FAULT + 300), other_targets_for_good
        )  # a cause that stays: in the end the ladder stops the run
    rewinds = course.sink.outcomes("rewind")
    assert all(o.applied for o in rewinds)
    first = [o for o in rewinds if o.at < FAULT + 100]
    reached = {int(o.action.args["back"]): [] for o in first}
    for o in first:
        reached[int(o.action.args["back"])].append(o.detail.split("those after step ")[1].split(" ")[0])
    assert {back: set(steps) for back, steps in reached.items()} == {0: {"59"}, **{k: {v} for k, v in deeper.items()}}
    assert [len(steps) for steps in reached.values()] == [9] * 4  # while it lasts the same again, then further back
    factors = [o.detail.split(",")[0] for o in course.sink.outcomes("cut_lr")][:3]
    assert factors == ["LR multiplier 1 -> 0.5", "LR multiplier 0.5 -> 0.05", "LR multiplier 0.05 -> 0.005"]
    assert not [o for o in rewinds if FAULT + 40 < o.at < FAULT + 100]  # it gave up, until the trouble counts as new
