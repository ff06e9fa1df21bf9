"""The trail of a run and the onset found in it: synthetic traces of known onset, and the state as plain data."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.stats.trail import MAX_ROWS, SIZE, Trail, onset_of
from trimtab.core.types import FULL_COLUMNS, Column, Kind, Layout, Sample


def layout(num: int) -> Layout:
    return Layout(
        names=tuple(f"p{i}" for i in range(num)), kinds=(Kind.GRAD,) * num, numel=(10,) * num, columns=(Column.L2,)
    )


class Trace:
    """A healthy run: a falling noisy loss, row norms that wander, a rate; trouble is multiplied in."""

    def __init__(self, seed: int, num_rows: int = 12, noise: float = 0.2) -> None:
        self.rng = np.random.default_rng(seed)
        self.layout = layout(num_rows)
        self.base = np.exp(self.rng.normal(0, 1, num_rows))
        self.noise = noise

    def sample(
        self, step: int, *, loss: float = 1.0, rows: float = 1.0, row: int | None = None, lr: float = 1.0
    ) -> Sample:
        norms = self.base * np.exp(self.noise * self.rng.normal(size=self.base.size)) * 0.99 ** (step / 10)
        norms[slice(None) if row is None else row] *= rows
        value = (0.2 + 2.0 * math.exp(-step / 60)) * math.exp(0.1 * self.rng.normal()) * loss
        return Sample(
            step=step,
            layout=self.layout,
            table=norms[:, None].astype(np.float32),
            scalars={
                "loss": value,
                "grad_norm": float(np.sqrt((norms**2).sum())),
                "update_ratio": 1e-3 * lr * math.exp(0.1 * self.rng.normal()),
                "lr/0": 1e-3 * lr,
            },
        )


def test_it_is_bounded_and_keeps_the_newest() -> None:
    trail, trace = Trail(), Trace(0)
    for step in range(3 * SIZE):
        trail.push(trace.sample(step))
    assert SIZE // 2 <= len(trail) <= SIZE
    assert trail.steps[-1] == 3 * SIZE - 1
    assert (np.diff(trail.steps) == 1).all()
    assert np.isfinite(trail.rows()).all()


def test_many_tensors_are_taken_together() -> None:
    trail = Trail()
    wide = layout(1000)
    table = np.ones((1000, 1), np.float32)
    table[0], table[500] = -1.0, np.nan
    trail.push(Sample(step=0, layout=wide, table=table, scalars={}))
    (row,) = trail.rows()
    assert row.shape == (MAX_ROWS,)
    assert np.isinf(row).sum() == 1
    others = np.exp(row[np.isfinite(row)])
    assert others == pytest.approx(math.sqrt(1000 / MAX_ROWS), rel=0.06)


def test_what_was_not_measured_or_not_finite() -> None:
    trail = Trail()
    nothing = Sample(step=3, layout=layout(0), table=np.zeros((0, 1), np.float32), scalars={"loss": math.nan})
    trail.push(nothing)
    trail.push(Sample(step=3, layout=nothing.layout, table=nothing.table, scalars={"val_loss": 1.0}, phase="val"))
    assert trail.steps.tolist() == [3]
    assert trail.scalar("loss").tolist() == [math.inf]
    assert np.isnan(trail.scalar("lr")).all()
    assert onset_of(trail, 3) == 3


def test_the_state_is_plain_and_small_and_goes_on_exactly_there() -> None:
    trail, trace = Trail(), Trace(1, num_rows=100)
    for step in range(220):
        trail.push(trace.sample(step))
    state = json.loads(json.dumps(trail.state_dict()))
    assert len(json.dumps(state)) < 60_000
    twin = Trail.from_state(state)
    trace2 = Trace(1, num_rows=100)
    trace2.rng.bit_generator.state = trace.rng.bit_generator.state
    for step in range(250, 300):
        trail.push(trace.sample(step, rows=5.0))
        twin.push(trace2.sample(step, rows=5.0))
    assert trail.state_dict() == twin.state_dict()
    assert onset_of(trail, 299) == onset_of(twin, 299) == 250


def test_other_tensors_begin_anew() -> None:
    trail, trace = Trail(), Trace(2)
    for step in range(40):
        trail.push(trace.sample(step))
    other = Trace(3, num_rows=5)
    for step in range(40, 60):
        trail.push(other.sample(step, rows=100.0))
    assert np.isnan(trail.rows()[:40]).all()
    assert trail.rows().shape == (60, 5)


KINDS = st.sampled_from(["loss", "rows", "one row", "rate"])


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), kind=KINDS, onset=st.integers(80, 300), lasts=st.integers(0, 40))
def test_a_sudden_change_is_found_where_it_is(seed: int, kind: str, onset: int, lasts: int) -> None:
    trail, trace = Trail(), Trace(seed)
    bad = {
        "loss": {"loss": 6.0},
        "rows": {"rows": 30.0},
        "one row": {"rows": 100.0, "row": 4},
        "rate": {"lr": 10.0},
    }[kind]
    for step in range(onset + lasts + 1):
        trail.push(trace.sample(step, **bad if step >= onset else {}))
    found = onset_of(trail, onset + lasts)
    assert onset - 6 <= found <= onset


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), onset=st.integers(80, 300), growth=st.floats(1.02, 1.1))
def test_a_slow_growth_of_the_rate_is_dated_long_before_the_alarm(seed: int, onset: int, growth: float) -> None:
    trail, trace = Trail(), Trace(seed)
    lasts = int(math.log(40.0) / math.log(growth))  # the alarm comes at forty times the rate
    for step in range(onset + lasts + 1):
        lr = growth ** max(step - onset, 0)
        trail.push(trace.sample(step, lr=lr, loss=1.0 if lr < 20 else 5.0))
    found = onset_of(trail, onset + lasts)
    jumped = math.log(9.5) / math.log(growth)  # below that a rate may be meant: it did no harm yet
    assert onset - 6 <= found <= onset + jumped + max(0, lasts - 90) + 2
    assert found <= onset + lasts - 5


def test_a_rate_that_does_no_harm_is_not_what_it_is_dated_by() -> None:
    trail, trace = Trail(), Trace(7)
    for step in range(200):
        lr = min(1.05 ** max(step - 120, 0), 7.0)
        trail.push(trace.sample(step, lr=lr, loss=6.0 if step >= 190 else 1.0))
    assert 185 <= onset_of(trail, 199) <= 190


def test_an_update_that_outgrows_its_rate_counts() -> None:
    trail, trace = Trail(), Trace(8)
    for step in range(130):
        sample = trace.sample(step, lr=0.5 if step >= 100 else 1.0)
        ratio = sample.scalars["update_ratio"] * (8.0 if step >= 118 else 1.0)
        trail.push(replace(sample, scalars={**sample.scalars, "update_ratio": ratio}))
    assert onset_of(trail, 129) == 118


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), at=st.integers(20, 400), noise=st.floats(0.01, 0.6))
def test_where_nothing_was_unusual_it_began_now(seed: int, at: int, noise: float) -> None:
    trail, trace = Trail(), Trace(seed, num_rows=40, noise=noise)
    for step in range(at + 1):
        trail.push(trace.sample(step))
    assert at - 12 <= onset_of(trail, at) <= at


def test_steps_that_were_taken_back_are_no_reference() -> None:
    trail, trace = Trail(), Trace(5)
    for step in range(120):
        trail.push(trace.sample(step, rows=50.0 if step >= 110 else 1.0))
    assert onset_of(trail, 119) == 110
    trail.cut(110)
    assert trail.steps[-1] == 109
    for step in range(120, 150):
        trail.push(trace.sample(step, rows=50.0 if step >= 145 else 1.0))
    assert onset_of(trail, 149) == 145


def test_a_linear_warm_up_is_not_the_trouble() -> None:
    trail, trace = Trail(), Trace(6)
    for step in range(101):
        trail.push(trace.sample(step, lr=(step + 1) / 100, loss=8.0 if step >= 98 else 1.0))
    assert onset_of(trail, 100) >= 75


def test_full_tables_are_read_as_well() -> None:
    trail = Trail()
    full = Layout(names=("a",), kinds=(Kind.GRAD,), numel=(1,), columns=FULL_COLUMNS)
    table = np.full((1, len(FULL_COLUMNS)), 2.0, np.float32)
    trail.push(Sample(step=0, layout=full, table=table, scalars={}))
    assert trail.rows()[0, 0] == pytest.approx(math.log(2.0), rel=1e-3)
