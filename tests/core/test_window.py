"""The window and the whole rule set: no value poisons them, a save changes nothing, memory does not grow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.config import Config
from trimtab.core.pipeline import Brain
from trimtab.core.stats.packed import unpacked
from trimtab.core.types import ABSENT, FROZEN, FULL_COLUMNS, NORM_COLUMNS, Column, Kind, Layout, Sample
from trimtab.core.window import LEVELS, NUM_PAST, TRACKED, Window

NAMES = ("stem.weight", "body.0.weight", "body.1.weight", "head.weight")
NUMEL = (4096, 1024, 1024, 256)
NORMS = Layout(names=NAMES, kinds=(Kind.GRAD,) * 4, numel=NUMEL, columns=NORM_COLUMNS)
FULL = Layout(
    names=NAMES + NAMES + ("bn.mean",),
    kinds=(Kind.GRAD,) * 4 + (Kind.WEIGHT,) * 4 + (Kind.BUFFER,),
    numel=NUMEL + NUMEL + (16,),
    columns=FULL_COLUMNS,
)
# What a sample may tell beside its loss and its gradient norm, and how often.
FACTS = {
    "update_ratio": 0.9,
    "in_rms": 0.9,
    "in_print": 0.9,
    "grad_cos": 0.8,
    "handed": 0.8,
    "carried": 0.8,
    "backwards": 0.8,
    "chance": 0.5,
    "clip_coef": 0.3,
    "scale": 0.3,
    "autocast": 0.3,
    "out_spread": 0.2,
    "towers_spread": 0.1,
    "temperature": 0.1,
    "outside": 0.1,
    "state_outside": 0.1,
    "ema_still": 0.1,
    "batch_size": 0.5,
    "loss_factor": 0.05,
    "moment_lag": 0.5,
    "targets_outside": 0.02,
    "nonfinite_grads": 0.02,
    "routine_overflow": 0.02,
    "rejected": 0.02,
    "same_gradients": 0.02,
    "eval_forward": 0.1,
    "no_grad_forward": 0.02,
    "in_bad": 0.02,
    "in_flat": 0.02,
    "in_empty": 0.01,
    "state_lost": 0.01,
    "state_bad": 0.01,
    "unheld": 0.02,
    "unheld_share": 0.02,
    "idle": 0.02,
    "untied": 0.01,
    "stuck": 0.02,
    "replayed": 0.02,
}


def table_of(layout: Layout, values: list[float]) -> np.ndarray[Any, np.dtype[np.float32]]:
    size = len(layout.names) * len(layout.columns)
    with np.errstate(over="ignore"):  # what does not fit a float32 is inf there
        cells = np.resize(np.array(values or [0.0], np.float64), size).astype(np.float32)
    table = cells.reshape(len(layout.names), len(layout.columns))
    for i, column in enumerate(layout.columns):
        if column in (Column.NAN, Column.INF):
            table[:, i] = ~np.isfinite(table[:, i])  # counts are always measured
        elif column in (Column.ZERO_FRAC, Column.UNDERFLOW_FRAC):
            table[:, i] = np.clip(table[:, i], 0, 1)
    return table


def walk(num: int, seed: int, start: int = 0) -> Iterator[Sample]:
    """A run that wanders about: every fact comes and goes, some values are not finite, rows come and go."""
    rng = np.random.default_rng(seed)
    loss, norm, rate = 2.0, 1.0, 0.1
    for step in range(start, start + num):
        loss *= math.exp(float(rng.normal(-0.002, 0.1)))
        norm *= math.exp(float(rng.normal(0, 0.1)))
        if rng.random() < 0.01:
            rate *= float(rng.choice([0.1, 10.0, 3.0]))
        scalars = {"loss": loss, "grad_norm": norm, "lr/0": rate}
        if rng.random() < 0.02:
            scalars["loss"] = float(rng.choice([math.nan, math.inf, 50 * loss]))
        if rng.random() < 0.02:
            scalars["grad_norm"] = float(rng.choice([math.nan, math.inf, 100 * norm, 0.0]))
        for name, often in FACTS.items():
            if rng.random() < often:
                scalars[name] = float(np.round(np.exp(rng.normal()), 1)) if rng.random() < 0.9 else 0.0
        if "towers_spread" in scalars:
            scalars |= {"towers_widest": 10 * scalars["towers_spread"], "tower": 1.0}
        if rng.random() < 0.05:
            scalars["val_loss"] = loss * float(rng.uniform(0.8, 2.0))
        layout = FULL if step % 10 == 0 else NORMS
        table = np.abs(rng.normal(size=(len(layout.names), len(layout.columns)))).astype(np.float32)
        for kind_of_row in (ABSENT, FROZEN, 0.0, np.nan):
            if rng.random() < 0.1:
                table[rng.integers(4), 0] = kind_of_row
        if layout is FULL:
            rare = rng.random() < 0.05
            table[:, [FULL_COLUMNS.index(c) for c in (Column.NAN, Column.INF)]] = float(rare)
        yield Sample(step=step, layout=layout, table=table, scalars=scalars)


def told(brain: Brain, sample: Sample) -> str:
    """A verdict and a decision as text: NaN in evidence is equal to NaN there."""
    verdict, decision = brain.advance(sample, seen_at=sample.step)
    return json.dumps([asdict(verdict), asdict(decision)])


def numbers_in(state: Any) -> Iterator[float]:
    if isinstance(state, dict):
        for value in state.values():
            yield from numbers_in(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from numbers_in(value)
    elif isinstance(state, int | float):
        yield float(state)


def lengths_in(state: Any, path: str = "") -> dict[str, int]:
    out: dict[str, int] = {}
    if isinstance(state, dict):
        for key, value in state.items():
            out |= lengths_in(value, f"{path}/{key}")
    elif isinstance(state, list | tuple):
        out[path] = len(state)
    return out


anything = st.one_of(
    st.floats(-10, 10),
    st.floats(-1e300, 1e300),
    st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 3e38, -3e38, 1e-300, ABSENT, FROZEN]),
)
some_facts = st.fixed_dictionaries(
    {}, optional=dict.fromkeys((*TRACKED, "lr/0", "batch_size", "out_spread", "clip_coef", "scale"), anything)
)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(some_facts, st.lists(anything, max_size=5), st.booleans()), min_size=1, max_size=80))
def test_no_value_gets_a_detector_out_of_bounds(
    steps: list[tuple[dict[str, float], list[float], bool]],
) -> None:
    brain = Brain.from_config(Config())
    for step, (scalars, cells, thorough) in enumerate(steps):
        layout = FULL if thorough else NORMS
        brain.advance(Sample(step=step, layout=layout, table=table_of(layout, cells), scalars=scalars), seen_at=step)
    state = brain.state_dict()["window"]
    state.pop("past")  # what was seen, as it was seen
    schedule = state.pop("schedule")
    assert math.isfinite(schedule["highest"])
    assert all(math.isfinite(v) for v in numbers_in(state))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(some_facts, st.lists(anything, max_size=5), st.booleans()), min_size=1, max_size=60))
def test_no_value_breaks_a_rule(steps: list[tuple[dict[str, float], list[float], bool]]) -> None:
    brain = Brain.from_config(Config())
    for step, (scalars, cells, thorough) in enumerate(steps):
        layout = FULL if thorough else NORMS
        sample = Sample(step=5 * step, layout=layout, table=table_of(layout, cells), scalars=scalars)
        brain.advance(sample, seen_at=5 * step)
    assert brain._broken == set()


@pytest.mark.parametrize("mode", ["advise", "act"])
@pytest.mark.parametrize("cut", [1, 17, 150])
def test_a_restored_brain_gives_the_same_verdicts_ever_after(mode: str, cut: int) -> None:
    config = Config(mode=mode)
    one, two = Brain.from_config(config), Brain.from_config(config)
    samples = list(walk(cut + 300, seed=cut))
    for sample in samples[:cut]:
        one.advance(sample, seen_at=sample.step)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    verdicts = [(told(one, sample), told(two, sample)) for sample in samples[cut:]]
    assert all(mine == yours for mine, yours in verdicts)
    assert sum('"code"' in mine for mine, _ in verdicts) > 40  # the rules were at work
    assert json.dumps(one.state_dict()) == json.dumps(two.state_dict())
    assert one._broken == two._broken == set()


@pytest.mark.long
def test_memory_does_not_grow() -> None:
    brain = Brain.from_config(Config(mode="act"))
    sizes: dict[int, dict[str, int]] = {}
    for sample in walk(5_000, seed=0):
        brain.advance(sample, seen_at=sample.step)
        if sample.step + 1 in (2_000, 5_000):
            sizes[sample.step + 1] = lengths_in(unpacked(brain.state_dict()))
    early, late = sizes[2_000], sizes[5_000]
    assert early.keys() <= late.keys()
    assert {path: n for path, n in late.items() if n > max(early.get(path, 0), 128)} == {}
    assert late["/window/past"] == NUM_PAST
    assert brain._broken == set()


def plain(step: int, phase: str = "train", **scalars: float) -> Sample:
    table = np.ones((4, 1), np.float32)
    return Sample(step=step, layout=NORMS, table=table, scalars=scalars, phase=phase)


def seen(*samples: Sample, alarming: bool = False) -> Window:
    """A window that looks at the last sample and has taken in those before it."""
    window = Window()
    for sample in samples[:-1]:
        window.look(sample)
        window.absorb(alarming=alarming)
    window.look(samples[-1])
    return window


def test_last_gives_finite_values_the_newest_included() -> None:
    window = seen(*(plain(i, x=v) for i, v in enumerate([1.0, math.nan, 3.0, 4.0])))
    assert window.last("x", 1) == [4.0]
    assert window.last("x", 2) == [3.0, 4.0]
    assert window.last("x", 4) == [1.0, 3.0, 4.0]
    assert window.last("x", 99) == [1.0, 3.0, 4.0]
    assert window.last("y", 4) == []


def test_a_streak_needs_every_step() -> None:
    window = seen(*(plain(i, x=v) for i, v in enumerate([1.0, 0.0, 1.0, 1.0])))
    assert window.streak("x", 1)
    assert window.streak("x", 2)
    assert not window.streak("x", 3)
    assert not window.streak("x", 9)
    assert not window.streak("y", 1)


def test_a_validation_is_no_training_step() -> None:
    window = seen(plain(0, loss=1.0), plain(0, phase="val", val_loss=2.0), plain(1, loss=1.0))
    assert len(window.past) == 1
    assert window.history("val_loss").values() == [2.0]
    assert len(window.level("loss")) == 1


def test_alarming_steps_stay_out_of_the_history_and_in_the_levels() -> None:
    window = seen(*(plain(i, loss=float(i)) for i in range(6)), alarming=True)
    assert len(window.history("loss")) == 0
    assert {len(window.level(name)) for name in LEVELS} == {0, 5}


@pytest.mark.parametrize(("name", "before", "after"), [("batch_size", 8.0, 64.0), ("lr/0", 0.01, 0.1)])
def test_a_change_the_loop_made_begins_the_drift_anew(name: str, before: float, after: float) -> None:
    def run(changed: float) -> Window:
        rates = {"lr/0": 0.01, "batch_size": 8.0}
        quiet = [plain(i, loss=1.0 + 0.01 * (i % 3), **(rates | {name: before})) for i in range(60)]
        loud = [plain(60 + i, loss=1.3, **(rates | {name: before})) for i in range(3)]
        then = [plain(63 + i, loss=1.0, **(rates | {name: changed})) for i in range(1)]
        return seen(*quiet, *loud, *then, plain(64, loss=1.0))

    kept, begun = run(before), run(after)
    assert kept.drift.total > begun.drift.total
    assert begun.level("loss").best >= kept.level("loss").best


def test_the_rest_of_an_epoch_hides_no_climb() -> None:
    """Every eleventh batch is two rows of 32; before, each of them made the loss's history begin anew."""
    rng = np.random.default_rng(0)
    losses = [1.0 + 0.01 * float(rng.normal()) for _ in range(110)] + [1.3] * 30
    sizes = [2.0 if i % 11 == 10 else 32.0 for i in range(140)]
    window = seen(*(plain(i, loss=a, batch_size=b) for i, (a, b) in enumerate(zip(losses, sizes, strict=True))))
    assert window.drift.alarmed
    assert 105 <= window.drift.onset <= 111
    assert len(window.level("loss")) == 139


def test_a_climb_is_added_up_from_its_onset() -> None:
    rng = np.random.default_rng(0)
    losses = [1.0 + 0.01 * float(rng.normal()) for _ in range(200)] + [3.0] * 30
    window = seen(*(plain(i, loss=loss) for i, loss in enumerate(losses)))
    assert window.drift.alarmed
    assert 195 <= window.drift.onset <= 201


@pytest.mark.parametrize("first", [2, 5, 1000])
def test_a_history_may_begin_in_the_middle_of_a_run(first: int) -> None:
    brain = Brain.from_config(Config())
    for sample in walk(100, seed=first, start=first):
        brain.advance(sample, seen_at=sample.step)
    assert brain._broken == set()


def test_a_loss_that_stays_where_it_is_does_not_drift() -> None:
    alarmed = []
    for seed in range(150):
        losses = np.random.default_rng(seed).normal(2.0, 0.3, size=120)
        window = Window()
        for step, loss in enumerate(losses):
            window.look(plain(step, loss=float(loss)))
            window.absorb(alarming=False)
            if window.drift.alarmed:
                alarmed.append((seed, step))
                break
    assert alarmed == []


@pytest.mark.parametrize("restored", [False, True])
def test_going_back_for_another_optimizer_forgets_only_the_newest_sample(restored: bool) -> None:
    """A rewind that this brain did not decide: it knows no onset, and before forgot all that it had seen."""
    brain = Brain.from_config(Config(mode="act"))
    for step in range(60):
        brain.advance(plain(step, loss=1.0, grad_norm=1.0), seen_at=step)
    if restored:
        state, brain = brain.state_dict(), Brain.from_config(Config(mode="act"))
        brain.load_state_dict(json.loads(json.dumps(state)))
    known = len(brain._window.past)
    brain.advance(replace(plain(60, loss=1.0, grad_norm=1.0), branch=1), seen_at=60)
    assert [len(brain._trail.steps), brain._trail.steps[-1]] == [60, 60]
    assert len(brain._window.past) == known
