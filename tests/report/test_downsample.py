"""Whatever the series: no extreme and no bad value is lost, and every value is counted once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.report.downsample import REACH, downsample

VALUES = st.lists(st.floats(width=32, allow_nan=True, allow_infinity=True), max_size=400)


@given(VALUES, st.integers(1, 40), st.data())
def test_extremes_counts_and_order_survive(values: list[float], num_buckets: int, data: st.DataObject) -> None:
    steps = data.draw(st.lists(st.integers(0, 10**9), min_size=len(values), max_size=len(values)))
    near = data.draw(st.lists(st.integers(0, 10**9), max_size=3))
    found = downsample(steps, values, num_buckets=num_buckets, near=near)
    array = np.array(values, dtype=np.float64)
    finite = array[np.isfinite(array)]
    assert found.num.sum() == array.size
    assert found.bad.sum() == array.size - finite.size
    assert found.nan.sum() == np.isnan(array).sum()
    assert (np.diff(found.first) > 0).all()
    assert (found.first <= found.last).all()
    assert (found.last[:-1] < found.first[1:]).all()
    assert {*found.first, *found.last} <= set(steps)
    if finite.size:
        assert np.nanmin(found.low) == finite.min()
        assert np.nanmax(found.high) == finite.max()
        assert set(found.middle[np.isfinite(found.middle)]) <= set(finite)
    held = np.isfinite(found.low)
    assert (found.low[held] <= found.middle[held]).all()
    assert (found.middle[held] <= found.high[held]).all()


@given(st.integers(1, 200_000), st.integers(1, 500))
def test_the_number_of_buckets_is_bounded(num: int, num_buckets: int) -> None:
    assert len(downsample(np.arange(num), np.zeros(num), num_buckets=num_buckets)) <= 2 * num_buckets


def test_every_step_near_a_finding_has_its_own_bucket() -> None:
    found = downsample(np.arange(100_000), np.arange(100_000.0), num_buckets=50, near=[70_000])
    close = (found.first >= 70_000 - REACH) & (found.first <= 70_000 + REACH)
    assert close.sum() == 2 * REACH + 1
    assert (found.num[close] == 1).all()
    assert found.num.sum() == 100_000


def test_what_was_measured_again_after_a_rewind_is_in_one_bucket() -> None:
    found = downsample([0, 1, 2, 1, 2, 3], [1.0, 2.0, 9.0, 3.0, 4.0, 5.0])
    assert found.first.tolist() == [0, 1, 2, 3]
    assert found.high.tolist() == [1.0, 3.0, 9.0, 5.0]
    assert found.num.tolist() == [1, 2, 2, 1]


def test_what_cannot_be_a_series_is_refused() -> None:
    with pytest.raises(ValueError, match="expected at least 1"):
        downsample([], [], num_buckets=0)
    with pytest.raises(ValueError, match="2 steps and 1 values"):
        downsample([1, 2], [1.0])
    assert len(downsample([], [])) == 0
