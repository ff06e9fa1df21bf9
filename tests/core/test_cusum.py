"""The CUSUM: its budget of false alarms is simulated, its delay and its change point are checked."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trimtab.core.stats.level import CAP, LIMIT, SLACK, Cusum, Level

NUM_CHAINS, NUM_STEPS = 4_000, 5_000


def pushed(values: Iterable[float], start: int = 0) -> Cusum:
    cusum = Cusum()
    for step, z in enumerate(values, start):
        cusum.push(z, step)
    return cusum


def totals(z: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums of many chains at once, `z` of shape [steps, chains]; the sum after every step."""
    total, out = np.zeros(z.shape[1]), np.empty_like(z)
    for i, row in enumerate(z):
        total = np.maximum(0.0, total + np.minimum(row, CAP) - SLACK)
        out[i] = total
    return out


def test_the_vectorised_sum_is_the_class() -> None:
    z = np.random.default_rng(0).normal(SLACK, 3.0, size=(400, 3))  # wide: the sum must be at work, not at zero
    fast = totals(z)
    assert fast.max() > LIMIT
    for chain in range(z.shape[1]):
        cusum = Cusum()
        for step in range(z.shape[0]):
            cusum.push(float(z[step, chain]), step)
            assert cusum.total == fast[step, chain]
            assert cusum.alarmed == (fast[step, chain] > LIMIT)


def test_normal_noise_at_the_reference_does_not_alarm_in_twenty_million_steps() -> None:
    rng = np.random.default_rng(1)
    total, worst, alarms = np.zeros(NUM_CHAINS), 0.0, 0
    for _ in range(NUM_STEPS):
        total = np.maximum(0.0, total + np.minimum(rng.standard_normal(NUM_CHAINS), CAP) - SLACK)
        alarms += int((total > LIMIT).sum())
        worst = max(worst, float(total.max()))
    assert NUM_CHAINS * NUM_STEPS >= 20_000_000
    assert alarms == 0
    assert worst < 0.75 * LIMIT  # not by a hair's breadth


def test_noise_around_the_best_level_ever_does_not_alarm_either() -> None:
    """The reference of a run is its best level, which lies below its mean: the budget must bear that as well."""
    level, cusum, worst = Level(), Cusum(), 0.0
    for step, loss in enumerate(np.random.default_rng(2).normal(2.0, 0.3, size=60_000)):
        if len(level) >= 20:
            cusum.push((float(loss) - level.best) / max(level.noise, 1e-12), step)
            worst = max(worst, cusum.total)
        level.push(float(loss))
    assert worst < LIMIT


def test_a_rise_by_six_deviations_is_found_in_six_steps() -> None:
    cusum = Cusum()
    delays = [step for step in range(20) if (cusum.push(6.0, step), cusum.alarmed)[1]]
    assert delays[0] + 1 <= 6
    rng = np.random.default_rng(3)
    noisy = totals(rng.normal(6.0, 1.0, size=(40, 2_000)))
    found = (noisy > LIMIT).argmax(0) + 1
    assert (noisy[-1] > LIMIT).all()
    assert float(np.median(found)) <= 8
    assert int(found.max()) <= 14


def test_the_change_point_is_where_the_sum_began_to_grow() -> None:
    cusum = pushed([0.0] * 100 + [6.0] * 10)
    assert cusum.alarmed
    assert cusum.onset == 100
    cusum.reset()
    assert (cusum.total, cusum.onset, cusum.alarmed) == (0.0, -1, False)


@given(st.floats(0, 1e300), st.lists(st.floats(-4, 1), max_size=30))
def test_a_single_outlier_never_alarms(outlier: float, around: list[float]) -> None:
    cusum = pushed(around)
    cusum.push(outlier, len(around))
    assert not cusum.alarmed
    assert cusum.total <= CAP - SLACK
    for step, z in enumerate(around, len(around) + 1):
        cusum.push(z, step)
        assert not cusum.alarmed


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_never_enters(bad: float) -> None:
    cusum = pushed([6.0, 6.0], start=5)
    before = cusum.state_dict()
    cusum.push(bad, 99)
    assert cusum.state_dict() == before
    fresh = pushed([bad] * 50)
    assert fresh.state_dict() == Cusum().state_dict()


@given(
    st.lists(st.floats(), max_size=60),
    st.lists(st.floats(-1e300, 1e300), max_size=30),
)
def test_the_sum_is_always_finite_and_goes_on_exactly_after_a_save(before: list[float], after: list[float]) -> None:
    one = pushed(before)
    assert math.isfinite(one.total)
    assert one.total >= 0.0
    two = Cusum.from_state(json.loads(json.dumps(one.state_dict())))
    for step, z in enumerate(after, len(before)):
        one.push(z, step)
        two.push(z, step)
    assert one.state_dict() == two.state_dict()
