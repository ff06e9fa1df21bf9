"""What the loop changed itself: rates, groups, batch sizes, and the effort so far."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.schedule import NEVER, RAISED, Schedule, rates_of
from trimtab.core.types import Layout, Sample

EMPTY = Layout(names=(), kinds=(), numel=(), columns=())


def sample(step: int, rates: Iterable[float] = (), size: float | None = None) -> Sample:
    scalars = {f"lr/{i}": r for i, r in enumerate(rates)}
    if size is not None:
        scalars["batch_size"] = size
    return Sample(step=step, layout=EMPTY, table=np.zeros((0, 0), np.float32), scalars=scalars)


def followed(rates: Iterable[float], sizes: Iterable[float] | None = None) -> Schedule:
    schedule = Schedule()
    rates = list(rates)
    for step, rate in enumerate(rates):
        schedule.absorb(sample(step, [rate], None if sizes is None else list(sizes)[step]))
    return schedule


def copy_of(schedule: Schedule) -> Schedule:
    return Schedule.from_state(json.loads(json.dumps(schedule.state_dict())))


def test_rates_are_read_group_by_group() -> None:
    assert rates_of({}) == ()
    assert rates_of({"lr/0": 0.1, "lr/1": 0.2, "lr/3": 9.0}) == (0.1, 0.2)
    assert rates_of({"lr/1": 0.2}) == ()


def test_without_rates_only_steps_are_counted() -> None:
    schedule = Schedule()
    for step in range(5):
        schedule.absorb(sample(step))
    assert schedule.num_seen == 5
    assert schedule.rates == ()
    assert schedule.effort == schedule.highest == 0.0
    assert schedule.raised_at == schedule.grown_at == schedule.resized_at == NEVER


def test_a_constant_rate_counts_every_step_fully() -> None:
    schedule = followed([0.1] * 50)
    assert schedule.effort == pytest.approx(50)
    assert schedule.highest == 0.1
    assert schedule.raised_at == NEVER


def test_a_warm_up_counts_for_little() -> None:
    ramp = [1e-3 * (i + 1) / 100 for i in range(100)]
    schedule = followed(ramp)
    assert schedule.raised_at == NEVER  # doubling in the first two steps is no raise
    assert schedule.effort == pytest.approx(sum(ramp) / max(ramp))
    assert schedule.effort < 52
    schedule = followed([*ramp, *[1e-3] * 100])
    assert 140 < schedule.effort < 152


def test_a_decay_counts_for_less_and_less() -> None:
    schedule = followed([0.1 * 0.9**i for i in range(200)])
    assert schedule.effort == pytest.approx(10, rel=0.01)
    assert schedule.highest == 0.1


def test_a_restart_is_a_raise_and_keeps_the_highest() -> None:
    cycle = [0.1 * 0.5 * (1 + math.cos(math.pi * i / 20)) for i in range(20)]
    schedule = followed(cycle * 2)
    assert schedule.raised_at == 20
    assert schedule.highest == 0.1


def test_a_raise_must_be_sudden_and_not_in_the_first_steps() -> None:
    assert followed([0.1, 0.1 * 1.05 * RAISED]).raised_at == NEVER
    assert followed([0.1] * 5 + [0.1 * 1.05 * RAISED]).raised_at == 5
    assert followed([0.1] * 5 + [0.1 * 0.9 * RAISED]).raised_at == NEVER
    assert followed([0.0] * 5 + [0.1]).raised_at == NEVER  # from nothing: there is no ratio


def test_after_a_jump_the_old_effort_is_worth_less() -> None:
    schedule = followed([0.01] * 100 + [0.1])
    assert schedule.effort == pytest.approx(11)


def test_new_groups_are_noticed_and_lost_ones_are_not() -> None:
    schedule = Schedule()
    for step, rates in enumerate([(0.1,), (0.1,), (0.1, 0.01), (0.1, 0.01), (0.1,)]):
        schedule.absorb(sample(step, rates))
    assert schedule.grown_at == 2
    assert schedule.rates == (0.1,)


def test_idle_steps_are_those_in_a_row_with_every_rate_at_zero() -> None:
    schedule = Schedule()
    for step, rates in enumerate([(0.0, 0.0), (0.0, 0.1), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]):
        schedule.absorb(sample(step, rates))
    assert schedule.idle_steps == 3
    schedule.absorb(sample(5, [0.1, 0.0]))
    assert schedule.idle_steps == 0


@pytest.mark.parametrize(
    ("sizes", "at"),
    [
        ((8, 8, 32), 2),
        ((32, 8, 8), 2),
        ((32, 8), NEVER),
        ((32, 32, 2, 32, 32, 2, 32), NEVER),
        ((32, 32, 2, 32, 64, 2, 64), 4),
        ((32, 2, 2, 32), 3),
        ((8, 9, 10, 7), NEVER),
        ((8, 12, 18, 27), NEVER),
        ((8,), NEVER),
    ],
)
def test_batch_sizes(sizes: tuple[float, ...], at: int) -> None:
    """Larger at once; smaller when it lasts, for the rest of an epoch does not; slowly is not a change at all."""
    assert followed([0.1] * len(sizes), sizes).resized_at == at
    half = len(sizes) // 2
    resumed = copy_of(followed([0.1] * half, sizes[:half]))
    for step in range(half, len(sizes)):
        resumed.absorb(sample(step, [0.1], sizes[step]))
    assert resumed.resized_at == at


def test_a_batch_of_unknown_size_is_no_change() -> None:
    schedule = Schedule()
    for step, size in enumerate([8.0, math.nan, 8.0, None, 8.0]):
        schedule.absorb(sample(step, [0.1], size))
    assert schedule.resized_at == NEVER
    assert schedule.batch_size == 8.0


def test_an_empty_batch_is_no_size_to_go_by() -> None:
    assert followed([0.1] * 4, (0.0, 0.0, 8.0, 8.0)).resized_at == NEVER
    assert followed([0.1] * 4, (8.0, 0.0, 0.0, 8.0)).batch_size == 8.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_rate_that_is_not_finite_does_not_stay(bad: float) -> None:
    schedule = followed([0.1] * 5 + [bad] + [0.1] * 5)
    assert schedule.highest == 0.1
    assert schedule.effort == pytest.approx(10)
    assert schedule.rates == (0.1,)


rates = st.lists(st.tuples(st.floats(0, 10), st.one_of(st.none(), st.floats(1, 1e6))), max_size=40)


@given(rates, rates)
def test_it_goes_on_exactly_after_a_save(
    before: list[tuple[float, float | None]], after: list[tuple[float, float | None]]
) -> None:
    one = Schedule()
    for step, (rate, size) in enumerate(before):
        one.absorb(sample(step, [rate], size))
    two = copy_of(one)
    assert two.state_dict() == one.state_dict()
    for step, (rate, size) in enumerate(after, len(before)):
        one.absorb(sample(step, [rate, rate / 2], size))
        two.absorb(sample(step, [rate, rate / 2], size))
    assert one.state_dict() == two.state_dict()
    assert 0 <= one.effort <= one.num_seen + 1e-6


def test_a_state_of_an_earlier_release_is_read() -> None:
    schedule = Schedule()
    schedule.jumped_at, schedule.jumped_from = 7, 0.5
    state = schedule.state_dict()
    old = {{"jumped_at": "leapt_at", "jumped_from": "leapt_from"}.get(k, k): v for k, v in state.items()}
    assert Schedule.from_state(old).state_dict() == state
