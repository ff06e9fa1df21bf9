"""The screen lets no step pass about which a rule would speak, and what it lets pass leaves the same memory behind."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from tests.runs.test_lag_and_replay import FAULTS, train
from trimtab.core.config import resolve
from trimtab.core.pipeline import Brain
from trimtab.core.registry import select_rules
from trimtab.core.screen import MAX_WAITING, Screen, common_bounds
from trimtab.core.types import NORM_COLUMNS, Kind, Layout, Record, Sample, Verdict
from trimtab.rules.vanishing_gradient import VanishingGradient

LAYOUT = Layout(names=("a", "b"), kinds=(Kind.GRAD, Kind.GRAD), numel=(4, 4), columns=NORM_COLUMNS)


class Collected:
    """A sink that keeps the samples."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def write(self, record: Record) -> None:
        if isinstance(record, Sample):
            self.samples.append(record)

    def close(self) -> None:
        pass


def text(brain: Brain) -> str:
    return json.dumps(brain.state_dict(), default=str, sort_keys=True)


def one_by_one(samples: list[Sample]) -> tuple[list[Verdict], str]:
    brain = Brain.from_config(resolve(None))
    verdicts = [brain.advance(sample, seen_at=sample.step)[0] for sample in samples]
    return [v for v in verdicts if v.findings], text(brain)


def with_waiting(samples: list[Sample]) -> tuple[list[Verdict], str, list[int]]:
    brain = Brain.from_config(resolve(None))
    verdicts: list[Verdict] = []
    waiting: list[Sample] = []
    passed = []
    for sample in samples:
        plain = sample.phase == "train" and not sample.notes and sample.layout.columns == NORM_COLUMNS
        if plain and brain.screen.passes(sample.step, sample.scalars, sample.table, float(sample.table.min())):
            waiting.append(sample)
            passed.append(sample.step)
            assert len(waiting) <= MAX_WAITING
            continue
        if waiting:
            brain.absorb(waiting)
        waiting = []
        verdicts.append(brain.advance(sample, seen_at=sample.step)[0])
    if waiting:
        brain.absorb(waiting)
    return [v for v in verdicts if v.findings], text(brain), passed


def nothing(step: int, model: nn.Module, optimizer: optim.Optimizer, x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("fault", [*FAULTS, "nothing"])
def test_real_runs_are_judged_alike_with_and_without_waiting(fault: str) -> None:
    kept = Collected()
    guard, _ = train(FAULTS.get(fault, nothing), run_dir=False, sinks=[kept])
    guard.close()
    assert [s.step for s in kept.samples if s.phase == "train"] == list(range(130))
    verdicts, state, passed = with_waiting(kept.samples)
    assert (verdicts, state) == one_by_one(kept.samples)
    if fault == "nothing":
        assert len(passed) > 60


RARE = {
    "nothing": {},
    "loss high": {"loss": 9.0},
    "loss low": {"loss": 0.0},
    "loss bad": {"loss": math.nan},
    "norm high": {"grad_norm": 40.0},
    "norm gone": {"grad_norm": 0.0},
    "huge update": {"update_ratio": 0.9},
    "no update": {"update_ratio": 0.0},
    "tiny update": {"update_ratio": 1e-7},
    "rate": {"lr/0": 1.0},
    "no rate": {"lr/0": 0.0},
    "same batch": {"in_print": 5.0},
    "large input": {"in_rms": 80.0},
    "bad input": {"in_bad": 1.0},
    "spread": {"out_spread": 0.0},
    "chance": {"chance": 1.0},
    "low chance": {"chance": 0.2},
    "high chance": {"chance": 3.0},
    "climbs": {"loss_factor": -1.0},
    "falls": {"loss_factor": 1.0},
    "below zero": {"bounded": 1.0, "loss": -4.0},
    "bounded": {"bounded": 1.0},
    "turns": {"grad_cos": -0.9},
    "handed little": {"handed": 0.001},
    "handed": {"handed": 1.0, "grad_cos": 0.1},
    "clipped": {"clip_coef": 0.01},
    "far apart": {"grad_norm": 1e-6},
    "two rates": {"lr/1": 0.1},
    "other rate": {"lr/1": 2.0},
    "batch": {"batch_size": 16.0},
    "larger batch": {"batch_size": 64.0},
    "smaller batch": {"batch_size": 4.0},
    "no loss": {"loss": None},
    "odd": {"theirs": math.inf},
}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    trend=st.floats(-0.02, 0.02),
    rare=st.lists(st.tuples(st.sampled_from(sorted(RARE)), st.integers(0, 150), st.integers(1, 160)), max_size=6),
)
def test_made_up_runs_are_judged_alike(seed: int, trend: float, rare: list[tuple[str, int, int]]) -> None:
    rng = np.random.default_rng(seed)
    samples = []
    for step in range(160):
        scalars = {
            "lr/0": 0.1,
            "loss": 1.0 * math.exp(trend * step) + 0.1 * rng.random(),
            "grad_norm": 1.0 + 0.3 * rng.random(),
            "rejected": 0.0,
            "in_print": float(step if rng.random() > 0.02 else step - 1),
            "in_rms": 1.0 + 0.05 * rng.random(),
            "update_ratio": 1e-3 * (1 + rng.random()),
        }
        norms = np.array([[0.5], [0.5]], np.float32)
        for name, begin, num in rare:
            if begin <= step < begin + num:
                scalars |= RARE[name]
                if name in ("norm gone", "far apart"):
                    norms[0] = 0.0 if name == "norm gone" else 1e-6
        scalars = {name: value for name, value in scalars.items() if value is not None}
        samples.append(Sample(step=step, layout=LAYOUT, table=norms, scalars=scalars))
    verdicts, state, _ = with_waiting(samples)
    assert (verdicts, state) == one_by_one(samples)


def test_bounds_of_several_rules_are_those_that_all_agree_on() -> None:
    low, high = common_bounds(select_rules(resolve(None)))["update_ratio"]
    assert 0 < low < 1e-4 < high < 0.25


def test_a_longer_start_to_be_looked_at_lets_nothing_pass() -> None:
    config = resolve({"rules": {"UPD001": {"span": 60}}})
    low, high = common_bounds(select_rules(config))["update_ratio"]
    assert not low < high


def test_a_rule_whose_bounds_fail_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, window: object) -> None:
        raise RuntimeError("no bounds")

    samples = [
        Sample(
            step=step,
            layout=LAYOUT,
            table=np.full((2, 1), 0.5, np.float32),
            scalars={"lr/0": 0.1, "loss": 1.0 + 0.1 * (step % 3), "grad_norm": 1.0 + 0.1 * (step % 5)},
        )
        for step in range(80)
    ]
    *_, usual = with_waiting(samples)
    monkeypatch.setattr(VanishingGradient, "silent_while", fail)
    *_, passed = with_waiting(samples)
    assert any(step % VanishingGradient.every == 0 for step in usual)
    assert passed
    assert all(step % VanishingGradient.every for step in passed)


def test_without_history_nothing_passes() -> None:
    brain = Brain.from_config(resolve(None))
    assert isinstance(brain.screen, Screen)
    assert not brain.screen.passes(1, {"loss": 1.0, "grad_norm": 1.0}, np.ones((2, 1), np.float32), 1.0)
