"""How long rows went without a gradient, or with a zero one."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimtab.core.stats.row_history import RowRuns
from trimtab.core.types import ABSENT, FROZEN

NAMES = ("a", "b", "c")


def pushed(rows: Iterable[Iterable[float]], names: tuple[str, ...] = NAMES) -> RowRuns:
    runs = RowRuns()
    for norms in rows:
        runs.push(names, np.array(list(norms), np.float32))
    return runs


def lists(runs: RowRuns) -> dict[str, list[int]]:
    return {f: getattr(runs, f).tolist() for f in ("absent", "zero", "real", "gaps")}


def test_every_row_with_a_gradient_is_calm() -> None:
    runs = pushed([[1, 2, 3]] * 5)
    assert runs.calm
    assert lists(runs) == {"absent": [0, 0, 0], "zero": [0, 0, 0], "real": [5, 5, 5], "gaps": [0, 0, 0]}


def test_absent_rows_are_counted_while_they_last() -> None:
    runs = pushed([[1, ABSENT, 3]] * 4)
    assert not runs.calm
    assert lists(runs) == {"absent": [0, 4, 0], "zero": [0, 0, 0], "real": [4, 0, 4], "gaps": [0, 0, 0]}


def test_zero_rows_are_counted_apart() -> None:
    runs = pushed([[1, 0, ABSENT], [1, 0, 0], [1, ABSENT, 0]])
    assert lists(runs) == {"absent": [0, 1, 0], "zero": [0, 0, 2], "real": [3, 0, 0], "gaps": [0, 0, 0]}


def test_frozen_rows_count_as_neither() -> None:
    runs = pushed([[1, FROZEN, 3]] * 4)
    assert runs.calm
    assert lists(runs) == {"absent": [0, 0, 0], "zero": [0, 0, 0], "real": [4, 0, 4], "gaps": [0, 0, 0]}


def test_freezing_ends_a_run_without_a_gap() -> None:
    runs = pushed([[1, ABSENT, 1], [1, ABSENT, 1], [1, FROZEN, 1], [1, 1, 1]])
    assert lists(runs) == {"absent": [0, 0, 0], "zero": [0, 0, 0], "real": [4, 1, 4], "gaps": [0, 0, 0]}


def test_routed_rows_that_come_back_are_known_by_their_gaps() -> None:
    rows = [[1.0, 1.0 if i % 3 == 0 else ABSENT, 1.0 if i % 2 == 0 else 0.0] for i in range(12)]
    runs = pushed(rows)
    assert runs.gaps.tolist() == [0, 3, 5]
    assert runs.real.tolist() == [12, 4, 6]
    assert runs.absent.tolist() == [0, 2, 0]
    assert runs.zero.tolist() == [0, 0, 1]


def test_a_norm_that_is_not_finite_is_a_gradient_all_the_same() -> None:
    runs = pushed([[np.nan, np.inf, 1]] * 2)
    assert runs.calm
    assert runs.real.tolist() == [2, 2, 2]


def test_renaming_keeps_what_is_known() -> None:
    runs = pushed([[1, ABSENT, 0]] * 3)
    runs.push(("c", "new", "b"), np.array([0, 1, ABSENT], np.float32))
    assert runs.names == ("c", "new", "b")
    assert lists(runs) == {"absent": [0, 0, 4], "zero": [4, 0, 0], "real": [0, 1, 0], "gaps": [0, 0, 0]}
    runs.push(("new",), np.array([1], np.float32))
    assert runs.calm
    assert lists(runs) == {"absent": [0], "zero": [0], "real": [2], "gaps": [0]}


def test_no_rows_at_all() -> None:
    runs = pushed([[]] * 3, ())
    assert runs.calm
    assert lists(runs) == {"absent": [], "zero": [], "real": [], "gaps": []}


def test_a_state_that_is_calm_and_one_that_is_not() -> None:
    for rows in ([[1, 2, 3]], [[1, ABSENT, 3]], [[0, 1, 1]]):
        runs = pushed(rows)
        restored = RowRuns.from_state(json.loads(json.dumps(runs.state_dict())))
        assert restored.calm == runs.calm
        assert restored.state_dict() == runs.state_dict()


cell = st.sampled_from([ABSENT, FROZEN, 0.0, 1.0, 1e-30, float("inf"), float("nan")])
table = st.lists(st.tuples(cell, cell, cell), max_size=30)


@given(table, table)
def test_counts_follow_their_definition_and_go_on_after_a_save(
    before: list[tuple[float, ...]], after: list[tuple[float, ...]]
) -> None:
    one = pushed(before)
    two = RowRuns.from_state(json.loads(json.dumps(one.state_dict())))
    for norms in after:
        for runs in (one, two):
            runs.push(NAMES, np.array(norms, np.float32))
    assert one.state_dict() == two.state_dict()
    rows = [*before, *after]
    for i in range(3 if rows else 0):
        column = [norms[i] for norms in rows]
        ends = {value: _run_at_the_end(column, value) for value in (ABSENT, 0.0)}
        assert one.absent[i] == ends[ABSENT]
        assert one.zero[i] == ends[0.0]
        assert one.real[i] == sum(1 for v in column if v not in (ABSENT, FROZEN, 0.0))


def _run_at_the_end(column: list[float], value: float) -> int:
    num = 0
    while num < len(column) and column[-1 - num] == value:
        num += 1
    return num
