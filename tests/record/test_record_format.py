from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.record.record_fakes import CLOSING, EVENTS, FULL, INF, INFO, LAYOUT, NAN, finding, same, sample
from trimtab.core.errors import RecordError
from trimtab.core.types import (
    Action,
    BrainState,
    Closing,
    Decision,
    Layout,
    Outcome,
    RunInfo,
    Sample,
    Severity,
    Verdict,
)
from trimtab.record import format
from trimtab.record import format as decode
from trimtab.record.format import encode_table, intact, scan_tables, table_values

floats = st.floats(allow_nan=True, allow_infinity=True)
texts = st.text(max_size=8)
ints = st.integers(-(2**40), 2**40)
numbers = st.dictionaries(texts, floats, max_size=4)
leaves = st.none() | st.booleans() | ints | floats | texts
nested = st.recursive(leaves, lambda x: st.lists(x, max_size=3) | st.dictionaries(texts, x, max_size=3), max_leaves=8)
mappings = st.dictionaries(texts, nested, max_size=4)
tuples = st.lists(texts, max_size=3).map(tuple)


def equal(a: object, b: object) -> bool:
    return repr(a) == repr(b)  # repr tells nan from None, -0.0 from 0.0, and finite floats exactly


def strict(line: bytes) -> None:
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    json.loads(line, parse_constant=lambda text: pytest.fail(f"{text} is not JSON"))


@st.composite
def events(draw: st.DrawFn) -> format.Event:
    action = Action(kind=draw(texts), args=draw(numbers))
    about = finding(
        draw(ints),
        severity=draw(st.sampled_from(Severity)),
        evidence=draw(numbers),
        subject=draw(tuples),
        message=draw(texts),
        advice=draw(tuples),
    )
    return draw(
        st.sampled_from(
            [
                BrainState(step=draw(ints), state=draw(mappings), optimizer=draw(texts)),
                Closing(steps={"": 3}, rejected=draw(ints), findings=2, reason=draw(texts), dropped={"a": 1}),
                Verdict(step=draw(ints), seen_at=4, findings=(about, about), optimizer=draw(texts), phase="val"),
                Decision(about=1, at=draw(ints), actions=(action,), because=draw(tuples), optimizer="o"),
                Outcome(at=draw(ints), action=action, applied=draw(st.booleans()), detail=draw(texts)),
            ]
        )
    )


@given(events(), st.integers(0, 2**62))
def test_events_round_trip(event: format.Event, seq: int) -> None:
    line = format.event_line(event, seq)
    strict(line)
    data = decode.parse_line(line)
    assert data["seq"] == seq
    assert equal(decode.to_event(data), event)


@given(mappings, texts, tuples)
def test_run_info_round_trips(config: dict[str, object], text: str, names: tuple[str, ...]) -> None:
    info = RunInfo(
        run_id=text,
        started=text,
        config=config,
        versions={"a": text},
        model=text,
        num_parameters=1,
        optimizers=names,
        rules=names,
    )
    line = format.run_line(info, 0)
    strict(line)
    assert line.startswith(format.FIRST_BYTES)
    assert equal(decode.to_info(decode.parse_line(line)), info)


@given(numbers, ints, st.integers(0, 9), st.sampled_from(["train", "val"]))
def test_samples_round_trip(scalars: dict[str, float], step: int, branch: int, phase: str) -> None:
    empty = np.empty((0, 1), np.float32)
    given_ = Sample(step=step, branch=branch, layout=LAYOUT, table=empty, scalars=scalars, phase=phase)
    line = format.sample_line(given_, 7, 3)
    strict(line)
    back = decode.to_sample_line(decode.parse_line(line))
    assert (back.seq, back.step, back.branch, back.layout, back.phase, back.num_floats) == (
        7,
        step,
        branch,
        3,
        phase,
        0,
    )
    assert equal(back.scalars, scalars)


def test_a_number_column_stays_numeric() -> None:
    data = json.loads(format.sample_line(sample(1, loss=NAN, grad_norm=INF, lr=0.1), 0, 0))
    assert data["scalars"] == {"loss": None, "grad_norm": None, "lr": 0.1}
    assert data["nf"] == {"loss": "nan", "grad_norm": "inf"}


def test_numpy_and_strangers_are_accepted() -> None:
    state = {
        "f": np.float32(0.1),
        "nan": np.float32("nan"),
        "i": np.int64(3),
        "a": np.array([1.0, INF]),
        "p": Path("x"),
        "s": {2, 1},
        "m": Layout.rows.__class__,
        4: (1, 2),
        "b": np.bool_(True),
        "proxy": type("T", (), {}).__dict__.__class__({"k": 1}),
    }
    line = format.event_line(BrainState(step=0, state=state), 0)
    strict(line)
    back = decode.to_event(decode.parse_line(line)).state  # type: ignore[union-attr]
    assert back["f"] == float(np.float32(0.1))
    assert math.isnan(back["nan"])
    assert back["a"] == [1.0, INF]
    assert (back["i"], back["p"], back["s"], back["4"], back["b"]) == (3, "x", [1, 2], [1, 2], True)
    assert back["proxy"] == {"k": 1}
    plain = format.event_line(BrainState(step=0, state={"m": state["proxy"], "i": np.int64(1)}), 0)
    assert decode.to_event(decode.parse_line(plain)).state == {"m": {"k": 1}, "i": 1}  # type: ignore[union-attr]


@pytest.mark.parametrize("lay", [LAYOUT, FULL])
def test_layouts_round_trip(lay: Layout) -> None:
    assert decode.to_layout(decode.parse_line(format.layout_line(lay, 9))) == lay


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1]",
        b"{}",
        b'{"t":"sample"}',
        b'{"t":1,"seq":1}',
        b'{"t":"x","seq":1e3}',
        b'{"t":"x","seq":NaN}',
        b"[" * 100_000,
        b'{"t":"x","seq":99999999999999999999}',
        b"\xff\xfe{",
    ],
)
def test_lines_of_others_are_refused(line: bytes) -> None:
    with pytest.raises(ValueError):
        decode.parse_line(line)


def test_a_newer_major_version_is_refused_and_a_newer_minor_is_not() -> None:
    decode.check_version({"version": [format.MAJOR, 99]}, "x")
    decode.check_version({}, "x")
    with pytest.raises(RecordError, match="upgrade"):
        decode.check_version({"version": [format.MAJOR + 1, 0]}, "x")


@settings(max_examples=200)
@given(st.data())
def test_a_line_with_anything_missing_or_changed_raises_only_what_is_expected(data: st.DataObject) -> None:
    lines = [format.event_line(e, 1) for e in [*EVENTS, CLOSING]]  # type: ignore[arg-type]
    lines += [format.run_line(INFO, 0), format.layout_line(FULL, 1), format.sample_line(sample(1, loss=NAN), 2, 1)]
    lines.append(format.event_line(Verdict(step=1, seen_at=1, findings=(finding(1, evidence={"a": NAN}),)), 4))
    parsed = json.loads(data.draw(st.sampled_from(lines)))
    key = data.draw(st.sampled_from(sorted(set(parsed) - {"t"})))
    if data.draw(st.booleans()):
        del parsed[key]
    else:
        parsed[key] = data.draw(nested)
    try:
        kind = decode.parse_line(json.dumps(parsed).encode())["t"]
        read = {"run": decode.to_info, "layout": decode.to_layout, "sample": decode.to_sample_line}
        read.get(kind, decode.to_event)(parsed)  # type: ignore[operator]
    except decode.DAMAGE:
        pass


@given(st.lists(st.floats(width=32), min_size=3, max_size=3), st.integers(-5, 2**62), st.integers(0, 2**31))
def test_tables_round_trip(values: list[float], step: int, branch: int) -> None:
    table = np.array(values, np.float32).reshape(3, 1)
    given_ = Sample(step=step, branch=branch, layout=LAYOUT, table=table, scalars={})
    data = encode_table(given_, 5, 77)
    entries, problems, end = scan_tables(data)
    assert (problems, end, len(entries)) == ([], len(data), 1)
    assert entries[0][1:6] == (5, branch, step, 77, 3)
    assert list(intact(data, entries[:1])) == [True]
    assert table_values(data, entries[0]).tobytes() == table.tobytes()


def test_a_table_of_the_wrong_shape_is_refused() -> None:
    wrong = Sample(step=1, layout=LAYOUT, table=np.ones((2, 2), np.float32), scalars={})
    with pytest.raises(ValueError, match="shape"):
        encode_table(wrong, 0, 0)


def test_a_damaged_header_costs_one_table() -> None:
    parts = [encode_table(sample(i), 0, i) for i in range(3)]
    data = bytearray(b"".join(parts))
    data[len(parts[0]) + 8] ^= 1
    entries, problems, _ = scan_tables(bytes(data))
    assert [entry.step for entry in entries] == [0, 2]
    assert len(problems) == 1


def test_damage_among_many_tables_of_one_size_costs_those_it_hits() -> None:
    parts = [encode_table(sample(i), 0, i) for i in range(300)]
    size, data = len(parts[0]), bytearray(b"".join(parts))
    data[100 * size + 9] ^= 1  # in a header
    data[150 * size : 150 * size + 4] = b"\0\0\0\0"  # all of its first word
    data[200 * size - 1] ^= 1  # in the numbers of the table before
    entries, problems, end = scan_tables(bytes(data) + parts[0][:-1])
    assert [entry.step for entry in entries] == [i for i in range(300) if i not in (100, 150)]
    assert [e.step for e, sound in zip(entries, intact(bytes(data), entries), strict=True) if not sound] == [199]
    assert end == 300 * size
    assert len(problems) == 3


def test_non_native_byte_order_and_strides_are_written_as_values() -> None:
    table = np.arange(6, dtype=">f4").reshape(3, 2)[:, :1]
    data = encode_table(Sample(step=0, layout=LAYOUT, table=table, scalars={}), 0, 0)
    assert table_values(data, scan_tables(data)[0][0]).tolist() == [0.0, 2.0, 4.0]


def test_same_sees_differences() -> None:
    assert same(sample(1, loss=NAN), sample(1, loss=NAN))
    assert not same(sample(1, loss=NAN), sample(1, loss=INF))
