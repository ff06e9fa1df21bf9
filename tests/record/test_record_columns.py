"""Lines read by a pattern are what JSON makes of them, and whatever does not fit is JSON again."""

from __future__ import annotations

import json
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.types import NORM_COLUMNS, Kind, Layout, Sample
from trimtab.record.columns import SampleColumns
from trimtab.record.format import SampleLine, parse_line, sample_line, to_sample_line

LAYOUT = Layout(names=("w",), kinds=(Kind.GRAD,), numel=(4,), columns=NORM_COLUMNS)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
SCALARS = st.dictionaries(NAMES, st.floats(), max_size=4)


def read_all(lines: list[bytes], columns: SampleColumns) -> int:
    """How many lines a pattern took."""
    fast = 0
    for raw in lines:
        if columns.read(raw):
            fast += 1
        else:
            columns.add(to_sample_line(parse_line(raw)), raw)
    return fast


def read_block(lines: list[bytes], columns: SampleColumns) -> list[int]:
    """The numbers of the lines that no pattern took."""
    slow = []
    for number, raw in columns.read_block(b"".join(line + b"\n" for line in lines)):
        slow.append(number)
        assert raw == lines[number]
        columns.add(to_sample_line(parse_line(raw)), raw)
    return slow


def same(one: SampleLine, other: SampleLine) -> bool:
    return one[:6] == other[:6] and one.notes == other.notes and repr(one.scalars) == repr(other.scalars)


@settings(max_examples=30)
@given(st.lists(st.tuples(SCALARS, st.sampled_from(["train", "val", 'a"b']), st.booleans()), max_size=12))
def test_every_line_is_what_json_makes_of_it(given_lines: list[tuple[dict[str, float], str, bool]]) -> None:
    raws = []
    for step, (scalars, phase, noted) in enumerate([*given_lines, *given_lines]):
        notes = {"named": ("x",)} if noted else {}
        sample = Sample(
            step=step, layout=LAYOUT, table=np.ones((1, 1), np.float32), scalars=scalars, phase=phase, notes=notes
        )
        raws.append(sample_line(sample, step, 1).rstrip(b"\n"))
    one_by_one, in_blocks = SampleColumns(), SampleColumns()
    read_all(raws, one_by_one)
    for at in range(0, len(raws), 9):
        read_block(raws[at : at + 9], in_blocks)
    wanted = [to_sample_line(parse_line(raw)) for raw in raws]
    for columns in (one_by_one, in_blocks):
        assert all(same(a, b) for a, b in zip(columns, wanted, strict=True))
        for name in {name for line in wanted for name in line.scalars}:
            steps, values = columns.series(name, "train", lambda layout: True)
            held = [line for line in wanted if name in line.scalars and line.phase == "train"]
            assert steps.tolist() == [line.step for line in held]
            np.testing.assert_array_equal(values, [line.scalars[name] for line in held])


def test_a_block_of_lines_of_several_kinds_is_read_by_patterns_in_the_order_written() -> None:
    raws = []
    for step in range(400):
        scalars = {"lr/0": 0.1, "loss": 1.0 / (1 + step)}
        if step % 5 == 3:
            scalars = {"chance": float(step), **scalars}
        if step % 10 == 2:
            scalars |= {"spread": 0.5}
        if step == 300:
            scalars["loss"] = math.nan
        layout = 1 + step % 2  # as of two optimizers: the same names, another layout
        sample = Sample(step=step, layout=LAYOUT, table=np.ones((1, 1), np.float32), scalars=scalars)
        raws.append(sample_line(sample, step, layout).rstrip(b"\n"))
    columns = SampleColumns()
    assert len(read_block(raws[:200], columns)) == 5  # each kind once: the longest has one layout, the others two
    assert read_block(raws[200:], columns) == [100]  # NaN
    assert all(same(a, to_sample_line(parse_line(b))) for a, b in zip(columns, raws, strict=True))
    assert columns.series("lr/0", "train", lambda layout: True)[0].tolist() == list(range(400))


def test_lines_alike_are_read_by_a_pattern_and_a_nan_between_them_by_json() -> None:
    losses = [1.0, 0.5, math.nan, 0.25, 1e-300, -2.0]
    raws = [
        sample_line(
            Sample(step=i, layout=LAYOUT, table=np.ones((1, 1), np.float32), scalars={"loss": loss, "lr/0": 0.1}), i, 1
        ).rstrip(b"\n")
        for i, loss in enumerate(losses)
    ]
    columns = SampleColumns(keep=lambda name: name == "loss")
    assert read_all(raws, columns) == 4
    np.testing.assert_array_equal(columns.series("loss", "train", lambda layout: True)[1], losses)
    assert columns.names("train", lambda layout: True) == ("loss",)


def test_what_is_no_number_is_left_to_json() -> None:
    good = b'{"t":"sample","seq":1,"step":1,"branch":0,"layout":1,"phase":"train","tab":0,"scalars":{"loss":1.5}}'
    columns = SampleColumns()
    columns.add(to_sample_line(json.loads(good)), good)
    assert columns.read(good)
    for bad in (b"1-5", b"--", b'"x"', b"null", b"1.5,", b"{}"):
        assert not columns.read(good.replace(b"1.5", bad))
    assert not columns.read(good.replace(b'"step":1', b'"step":-1'))
    assert len(columns) == 2


def test_lines_with_the_same_values_not_finite_are_read_by_a_pattern_of_their_own() -> None:
    broken = [{}, {"loss": math.nan}, {"loss": math.inf}, {"loss": -math.inf}, {"loss": math.nan, "g1": math.inf}]
    broken += [{"g1": math.nan}, {"g2": math.nan}]  # names that differ in a digit alone
    raws = []
    for step in range(2_000):
        scalars = {"loss": 1.0 / (1 + step), "g1": 0.5, "lr/0": 0.1, "g2": 0.25} | broken[step * 7919 % len(broken)]
        sample = Sample(step=step, layout=LAYOUT, table=np.ones((1, 1), np.float32), scalars=scalars)
        raws.append(sample_line(sample, step, 1).rstrip(b"\n"))
    wanted = [to_sample_line(parse_line(raw)) for raw in raws]
    everything, some = SampleColumns(), SampleColumns(keep=lambda name: name in ("loss", "g2"))
    assert read_all(raws, everything) == len(raws) - len(broken)
    assert len(read_block(raws[:1_000], some)) == len(broken)
    assert read_block(raws[1_000:], some) == []
    assert all(same(a, b) for a, b in zip(everything, wanted, strict=True))
    for name in ("loss", "g2"):
        values = some.series(name, "train", lambda layout: True)[1]
        np.testing.assert_array_equal(values, [line.scalars[name] for line in wanted])


def test_lines_from_which_nothing_can_be_learned_do_not_use_up_what_may_be_learned() -> None:
    good = b'{"t":"sample","seq":1,"step":1,"branch":0,"layout":1,"phase":"train","tab":0,"scalars":{"loss":1.5}}'
    other = good.replace(b'"seq":1,"step":1', b'"step":1,"seq":1')  # not in the writer's order
    columns = SampleColumns()
    assert read_all([other] * 200, columns) == 0
    assert read_all([good] * 10, columns) == 9
