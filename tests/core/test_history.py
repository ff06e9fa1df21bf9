"""Series, row baselines and the window: robust, bounded, poison-proof, and exact across a save."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.stats.row_history import RowBaseline
from trimtab.core.stats.series import SIZE, Series
from trimtab.core.types import NORM_COLUMNS, Kind, Layout, Sample
from trimtab.core.window import MAX_LEFT_OUT, Window

numbers = st.one_of(st.floats(-1e300, 1e300), st.floats(-10, 10), st.sampled_from([math.nan, math.inf, -math.inf]))


@given(st.lists(numbers, max_size=300))
def test_series_keeps_only_finite_values_and_stays_bounded(xs: list[float]) -> None:
    series = Series()
    for x in xs:
        series.push(x)
    finite = [x for x in xs if math.isfinite(x)]
    assert series.num_seen == len(finite)
    assert len(series) == min(len(finite), SIZE)
    assert series.recent_max == max(finite[-SIZE:], default=-math.inf)
    assert series.highest == max(finite, default=-math.inf)
    if finite:
        assert series.median() == pytest.approx(float(np.median(finite[-SIZE:])), rel=1e-12, abs=1e-300)
        assert series.initial == pytest.approx(float(np.median(finite[:8])), rel=1e-12, abs=1e-300)
    restored = Series.from_state(json.loads(json.dumps(series.state_dict())))
    assert restored.state_dict() == series.state_dict()


def test_z_scores_are_zero_without_history_and_robust_with_it() -> None:
    series = Series()
    assert series.log_z(5.0) == series.z(5.0) == 0.0
    assert math.isnan(series.median())
    for i in range(50):
        series.push(1.0 + 0.01 * (i % 5))
    series.push(1e6)  # one outlier must not move the scale
    assert series.log_z(1.02) == pytest.approx(0.0, abs=0.2)
    assert series.log_z(100.0) > 20
    assert series.log_z(-1.0) == 0.0
    assert series.z(2.0) > 20


def layout(*names: str) -> Layout:
    return Layout(names=names, kinds=(Kind.GRAD,) * len(names), numel=(1,) * len(names), columns=NORM_COLUMNS)


def sample(step: int, lay: Layout, norms: list[float], **scalars: float) -> Sample:
    return Sample(step=step, layout=lay, table=np.array([norms], np.float32).T, scalars=scalars)


def test_row_baseline_attributes_growth_and_survives_gaps() -> None:
    base = RowBaseline()
    for _ in range(50):
        base.push(("a", "b", "c"), np.array([1.0, 2.0, -1.0], np.float32))
    growth = base.growth(("a", "b", "c"), np.array([10.0, 2.0, 5.0], np.float32))
    assert growth == pytest.approx([10.0, 1.0, 1.0], rel=1e-5)  # c was never there: nothing to compare with
    assert base.growth(("a", "b", "c"), np.array([np.nan, 2.0, -1.0], np.float32))[0] == math.inf
    assert base.growth(("x",), np.array([3.0], np.float32)).tolist() == [1.0]
    base.push(("b", "d"), np.array([2.0, 3.0], np.float32))  # rows changed: what is known of b is kept
    assert base.growth(("b", "d"), np.array([4.0, 3.0], np.float32)) == pytest.approx([2.0, 1.0], rel=1e-5)
    restored = RowBaseline.from_state(json.loads(json.dumps(base.state_dict())))
    assert restored.state_dict() == base.state_dict()


def test_fast_and_careful_updates_agree() -> None:
    rng = np.random.default_rng(0)
    fast, careful = RowBaseline(), RowBaseline()
    names = ("a", "b", "missing")
    for _ in range(20):
        norms = rng.uniform(0.1, 10, 2).astype(np.float32)
        fast.push(names[:2], norms)
        careful.push(names, np.append(norms, np.float32(-1)))  # an absent row takes the careful way
    assert fast.state_dict()["log"] == pytest.approx(careful.state_dict()["log"][:2], rel=1e-6)


def test_window_leaves_young_alarms_out_and_accepts_a_new_normal() -> None:
    window = Window()
    with pytest.raises(LookupError):
        _ = window.now
    lay = layout("w")
    for i in range(30):
        window.look(sample(i, lay, [1.0], loss=1.0, grad_norm=1.0))
        window.absorb(alarming=False)
    for i in range(MAX_LEFT_OUT + 3):
        window.look(sample(30 + i, lay, [9.0], loss=9.0, grad_norm=9.0))
        window.absorb(alarming=True)
    assert window.history("loss").num_seen == 33
    assert window.scalar("loss") == 9.0
    assert window.scalar("val_loss") is None
    state = json.loads(json.dumps(window.state_dict()))
    other = Window()
    other.load_state_dict(state)
    assert other.state_dict() == window.state_dict()
