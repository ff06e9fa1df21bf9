"""A record that grows, all runs of a directory, and a run as columns."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trimtab
from trimtab.core.errors import InputError, MissingPackageError, RecordError
from trimtab.core.types import Closing, Finding, Kind, Layout, RunInfo, Sample, Severity, Verdict
from trimtab.record.frames import columns_of, write_csv, write_parquet
from trimtab.record.reader import Run, RunFollower, read_run
from trimtab.record.run_list import QUIET_HERE_S, QUIET_S, State, list_runs, look_at
from trimtab.record.writer import RunWriter

LAYOUT = Layout(names=("w", "b"), kinds=(Kind.GRAD, Kind.GRAD), numel=(4, 2))
EVIL = "<script>alert(1)</script>\x1b[31m"


def info(name: str = "run-1", **changed: object) -> RunInfo:
    given = {
        "run_id": name,
        "started": "2026-01-02T03:04:05+00:00",
        "config": {},
        "versions": {},
        "model": "Toy",
        "num_parameters": 6,
        "optimizers": ("",),
        "rules": (),
    }
    return RunInfo(**(given | changed))  # type: ignore[arg-type]


def write(folder: Path, num_steps: int = 5, *, closed: bool = True, **changed: object) -> Path:
    writer = RunWriter(folder)
    writer.write(info(folder.name, **changed))
    for step in range(num_steps):
        table = np.full((2, 7), step, np.float32)
        scalars = {"loss": math.nan if step == 3 else 1.0 / (1 + step), "grad_norm": 2.0}
        writer.write(Sample(step=step, layout=LAYOUT, table=table, scalars=scalars))
    finding = Finding(code="LOSS001", name=EVIL, step=3, severity=Severity.ERROR, message=EVIL, advice=(EVIL,))
    writer.write(Verdict(step=3, seen_at=3, findings=(finding,)))
    if closed:
        writer.write(Closing(steps={"": num_steps}, rejected=0, findings=1, reason="closed"))
    writer.close()
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "run-1", 12)


def contents(run: Run) -> object:
    samples = [(s.step, s.branch, s.table.tolist(), repr(s.scalars), s.phase) for s in run.samples()]
    return samples, run.info, run.layouts, run.verdicts, run.closing


@given(cuts=st.lists(st.integers(1, 10_000), max_size=8), tables_first=st.booleans())
def test_however_a_record_grows_it_is_read_as_the_whole_one(
    whole: Path, tmp_path_factory: pytest.TempPathFactory, cuts: list[int], tables_first: bool
) -> None:
    lines, tables = (whole / "run.jsonl").read_bytes(), (whole / "tables.f32").read_bytes()
    folder = tmp_path_factory.mktemp("grows")
    follower = RunFollower(folder)
    for cut in sorted({min(cut, len(lines)) for cut in (1, *cuts, len(lines))}):
        share = len(tables) if tables_first else len(tables) * cut // len(lines)
        (folder / "tables.f32").write_bytes(tables[:share])
        with (folder / "run.jsonl").open("r+b" if (folder / "run.jsonl").exists() else "wb") as file:
            file.write(lines[:cut])
        follower.update()
    assert contents(follower.run) == contents(read_run(whole))
    assert not follower.update()


def test_a_record_that_was_replaced_is_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "run-1", 9, closed=False)
    follower = RunFollower(folder)
    assert follower.update()
    write(tmp_path / "other", 4)
    for name in ("run.jsonl", "tables.f32"):
        (tmp_path / "other" / name).replace(folder / name)
    assert follower.update()
    assert contents(follower.run) == contents(read_run(folder))


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no folder"):
        RunFollower(tmp_path / "nowhere").update()
    (tmp_path / "run.jsonl").write_bytes(b"")
    with pytest.raises(RecordError, match="is empty"):
        RunFollower(tmp_path).update()
    (tmp_path / "run.jsonl").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(RecordError, match="not a record"):
        RunFollower(tmp_path).update()


def test_runs_are_listed_with_what_their_ends_say(tmp_path: Path) -> None:
    write(tmp_path / "a", started="2026-01-01T00:00:00+00:00", script="train.py")
    write(tmp_path / "b", started="2026-01-03T00:00:00+00:00", closed=False)
    (tmp_path / "20250101-000000-00001-abcd").mkdir()
    (tmp_path / "not a run").mkdir()
    b, a, empty = list_runs(tmp_path)
    assert (a.name, a.num_steps, a.state, a.info.script) == ("a", 5, State.ENDED, "train.py")
    assert (b.name, b.num_steps, b.state) == ("b", 5, State.LIVE)
    assert "missing" in empty.problem
    assert list_runs(tmp_path / "a")[0].name == "a"
    with pytest.raises(RecordError, match="no folder"):
        list_runs(tmp_path / "nowhere")


def test_whether_a_run_is_live(tmp_path: Path) -> None:
    here = {"host": socket.gethostname(), "pid": os.getpid()}
    mine = write(tmp_path / "mine", closed=False, **here)
    far = write(tmp_path / "far", closed=False, host="another", pid=os.getpid())
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead = write(tmp_path / "dead", closed=False, host=here["host"], pid=ended.pid)
    written_s = (mine / "run.jsonl").stat().st_mtime
    assert look_at(mine, written_s + QUIET_S + 60).state is State.LIVE
    assert look_at(mine, written_s + QUIET_HERE_S + 60).state is State.NOT_CLOSED
    assert look_at(far, written_s + 1).state is State.LIVE
    assert look_at(far, written_s + QUIET_S + 60).state is State.NOT_CLOSED
    assert look_at(dead, written_s).state is State.NOT_CLOSED


@given(data=st.binary(max_size=400), valid=st.booleans())
def test_looking_at_anything_is_never_an_error(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, data: bytes, valid: bool
) -> None:
    folder = tmp_path_factory.mktemp("noise")
    lines = (whole / "run.jsonl").read_bytes() if valid else b""
    (folder / "run.jsonl").write_bytes(lines + data)
    assert look_at(folder).folder == folder


@pytest.mark.parametrize("field", ["script", "host", "pid", "started", "run_id", "model"])
@pytest.mark.parametrize("value", [None, -1, 10**40, EVIL, [], {}, "9" * 5000])
def test_a_run_line_with_anything_in_it_is_listed(tmp_path: Path, whole: Path, field: str, value: object) -> None:
    first, rest = (whole / "run.jsonl").read_text().split("\n", 1)
    (tmp_path / "run.jsonl").write_text(json.dumps(json.loads(first) | {field: value}) + "\n" + rest)
    entry = look_at(tmp_path)
    assert entry.num_steps == 12
    assert entry.started is None or entry.started.year >= 1


def test_a_run_of_a_later_format_says_so(tmp_path: Path, whole: Path) -> None:
    first, rest = (whole / "run.jsonl").read_text().split("\n", 1)
    (tmp_path / "run.jsonl").write_text(json.dumps(json.loads(first) | {"version": [99, 0]}) + "\n" + rest)
    assert "upgrade trimtab" in look_at(tmp_path).problem


def test_a_run_as_columns(whole: Path) -> None:
    run = trimtab.Run(whole)
    steps = columns_of(run)
    assert list(steps) == ["step", "branch", "phase", "optimizer", "loss", "grad_norm"]
    assert list(steps["step"]) == list(range(12))
    assert [i for i, v in enumerate(steps["loss"]) if math.isnan(v)] == [3]
    assert columns_of(run, "findings")["message"] == [EVIL]
    layers = columns_of(run, "layers")
    assert len(layers["l2"]) == 24
    assert layers["l2"][-1] == 11.0
    assert list(layers["name"][:2]) == ["w", "b"]
    with pytest.raises(InputError, match="no table 'nonsense'"):
        columns_of(run, "nonsense")


@pytest.mark.parametrize("what", ["steps", "findings", "layers"])
def test_a_long_run_comes_in_pieces(whole: Path, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(whole)
    at_once = columns_of(run, what)
    monkeypatch.setattr("trimtab.record.frames._PIECE", 5)
    in_pieces = columns_of(run, what)
    assert {k: repr(list(v)) for k, v in at_once.items()} == {k: repr(list(v)) for k, v in in_pieces.items()}


def test_csv_cannot_hold_a_formula(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    bad = Finding(code="X", name="=HYPERLINK(1)", step=0, severity=Severity.WARN, message="@SUM(1)\n2", subject=("+1",))
    writer.write(Verdict(step=0, seen_at=0, findings=(bad,)))
    writer.close()
    out = io.StringIO()
    assert write_csv(read_run(tmp_path), "findings", out) == 1
    (row,) = csv.DictReader(io.StringIO(out.getvalue()))
    assert (row["name"], row["message"], row["subject"]) == ("'=HYPERLINK(1)", "'@SUM(1)\n2", "'+1")


def test_tables_of_other_libraries(whole: Path, tmp_path: Path) -> None:
    run = trimtab.Run(whole)
    if find_spec("pandas") is None:
        with pytest.raises(MissingPackageError, match="pip install pandas"):
            run.to_pandas()
    else:
        assert run.to_pandas().set_index("step").loss[1] == 0.5
        assert len(run.to_pandas("layers")) == 24
    if find_spec("pyarrow") is None:
        with pytest.raises(MissingPackageError, match="pip install pyarrow"):
            run.to_arrow()
    else:
        import pyarrow.parquet

        assert run.to_arrow("findings").column("step").to_pylist() == [3]
        assert write_parquet(run, "layers", tmp_path / "x.parquet") == 24
        assert pyarrow.parquet.read_table(tmp_path / "x.parquet").num_rows == 24


def test_notebooks_show_a_run_a_verdict_and_a_finding(whole: Path) -> None:
    run = trimtab.Run(whole)
    for shown in (run, run.verdicts[0], run.findings[0], Verdict(step=2, seen_at=2)):
        text = shown._repr_html_()
        assert "<script" not in text
        assert "step" in text
    assert "Do first: &lt;script&gt;" in run._repr_html_()
    assert "<path" in run._repr_html_()
    assert repr(run) == "<trimtab.Run run-1: 12 steps, 1 finding, closed>"
