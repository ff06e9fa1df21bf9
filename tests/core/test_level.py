"""Running medians: robust to outliers and non-finite values, exact across a save."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.stats.level import FIRST, SHORT, Level

numbers = st.one_of(st.floats(-1e300, 1e300), st.floats(-10, 10), st.sampled_from([math.nan, math.inf, -math.inf]))


def filled(values: list[float]) -> Level:
    level = Level()
    for value in values:
        level.push(value)
    return level


def copy_of(level: Level) -> Level:
    return Level.from_state(json.loads(json.dumps(level.state_dict())))


def test_an_empty_level_knows_nothing() -> None:
    level = Level()
    assert len(level) == 0
    assert math.isnan(level.now)
    assert math.isnan(level.start)
    assert level.best == math.inf
    assert copy_of(level).state_dict() == level.state_dict()


@given(st.lists(numbers, max_size=80))
def test_only_finite_values_get_in(xs: list[float]) -> None:
    level = filled(xs)
    finite = [x for x in xs if math.isfinite(x)]
    assert len(level) == len(finite)
    assert math.isfinite(level.noise)
    assert level.noise >= 0
    if finite:
        recent = sorted(finite[-SHORT:])
        assert level.now == recent[len(recent) // 2]
        first = sorted(finite[:FIRST])
        assert level.start == first[len(first) // 2]
    if len(finite) < SHORT:
        assert level.best == math.inf
    else:
        assert min(finite) <= level.best <= max(finite)
    assert copy_of(level).state_dict() == level.state_dict()


@given(st.lists(numbers, max_size=60), st.lists(numbers, max_size=40))
def test_a_restored_level_goes_on_exactly(before: list[float], after: list[float]) -> None:
    one = filled(before)
    two = copy_of(one)
    for value in after:
        one.push(value)
        two.push(value)
    assert one.state_dict() == two.state_dict()


def test_best_is_the_lowest_level_there_was() -> None:
    falling = [10.0 - 0.1 * i for i in range(60)]
    rising = [4.1 + 0.2 * i for i in range(40)]
    level = filled(falling)
    lowest = level.best
    assert level.now == lowest
    for value in rising:
        level.push(value)
    assert level.best <= lowest
    assert level.now > level.best
    assert level.start == pytest.approx(9.9)


def test_best_never_rises_by_itself() -> None:
    rng = np.random.default_rng(0)
    level = Level()
    bests = []
    for value in rng.normal(size=2000):
        level.push(float(value))
        bests.append(level.best)
    assert all(b <= a for a, b in pairwise(bests))


def test_rebase_forgets_the_best() -> None:
    level = filled([1.0] * 20 + [3.0] * 20)
    assert level.best == 1.0
    level.rebase()
    assert level.best == 3.0


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_noise_is_about_one_deviation(scale: float) -> None:
    rng = np.random.default_rng(1)
    level = Level()
    seen = []
    for i, value in enumerate(rng.normal(5.0 * scale, scale, size=4000)):
        level.push(float(value))
        if i > 100:
            seen.append(level.noise)
    assert float(np.median(seen)) == pytest.approx(scale, rel=0.25)
    assert 0.3 * scale < min(seen)
    assert max(seen) < 3.0 * scale


def test_noise_of_a_constant_is_zero() -> None:
    assert filled([2.0] * 50).noise == 0.0


def test_one_outlier_hardly_moves_anything() -> None:
    rng = np.random.default_rng(2)
    values = [float(v) for v in rng.normal(1.0, 0.1, size=200)]
    calm, hit = filled(values), filled([*values, 1e12])
    assert hit.now == pytest.approx(calm.now, abs=0.2)
    assert hit.best == calm.best
    assert hit.noise < 2.0 * calm.noise


def test_values_at_the_end_of_the_range_leave_the_noise_finite() -> None:
    assert math.isfinite(filled([1.7e308, -1.7e308] * 10).noise)
