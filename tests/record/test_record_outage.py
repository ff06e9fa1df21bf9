"""A disk that refuses for a while costs at most what does not fit into memory meanwhile, and the record says so."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.record.record_fakes import CLOSING, FULL, INFO, Keep, layout, same, sample, verdict
from trimtab.core.types import Record, RunInfo, Sample
from trimtab.record import recorder as outlet_module
from trimtab.record import writer as writer_module
from trimtab.record.csv_sink import CsvSink
from trimtab.record.reader import Run, read_run
from trimtab.record.recorder import Recorder
from trimtab.record.writer import RunWriter

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ENOENT, errno.ESTALE)
OPERATIONS = ("open", "write", "ftruncate", "fstat", "close", "stat", "mkdir", "rename", "link", "replace", "unlink")
LONG_S = 60.0


class Disk:
    """Stands between a writer and the disk, and makes operations fail: those whose number `broken` says."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.num = 0
        self.broken: Callable[[int], int | None] = lambda number: None
        self.short = False
        self._folder = str(folder)
        self._open: set[int] = set()
        self._real = {name: getattr(os, name) for name in OPERATIONS}
        for name in OPERATIONS:
            patch.setattr(os, name, self._wrapped(name))

    def _wrapped(self, name: str) -> Callable[..., Any]:
        real = self._real[name]

        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            mine = first in self._open if isinstance(first, int) else str(first).startswith(self._folder)
            if not mine:
                return real(first, *args, **kwargs)
            error = self.broken(self.num)
            self.num += 1
            if name == "close":
                self._open.discard(first)
                real(first)  # it is closed, even if what it wrote did not arrive
            if error is not None:
                if name == "write" and len(args[0]) > 1:
                    real(first, args[0][: len(args[0]) // 2])  # half of it fitted
                raise OSError(error, os.strerror(error))
            if name == "close":
                return None
            if name == "write" and self.short:
                return real(first, args[0][: max(1, len(args[0]) // 3)])
            out = real(first, *args, **kwargs)
            if name == "open":
                self._open.add(out)
            return out

        return call


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    with monkeypatch.context() as patch:
        yield Disk(tmp_path / "runs", patch)


def story() -> list[Record]:
    records: list[Record] = [INFO]
    for i in range(12):
        records.append(sample(i, value=i, loss=1.0 / (i + 1)))
        if i == 4:
            records.append(verdict(4))
        if i == 8:
            records.append(sample(8, lay=FULL, phase="val", loss=2.0))
    return [*records, CLOSING]


def tell(folder: Path, records: list[Record], disk: Disk, broken: Callable[[int], int | None]) -> None:
    """Write with a flush after every record, as on a slow run; whatever the disk refuses is tried again later."""
    writer = RunWriter(folder)
    disk.num, disk.broken = 0, broken
    for record in records:
        writer.write(record)
        with contextlib.suppress(OSError):
            writer.flush()
    for _ in range(100):
        with contextlib.suppress(OSError):
            writer.close()
            break
    disk.broken = lambda i: None


def complete(folder: Path, records: list[Record]) -> Run:
    run = read_run(folder)
    wanted = [record for record in records if isinstance(record, Sample)]
    assert all(same(a, b) for a, b in zip(run.samples(), wanted, strict=True))
    assert (len(run.verdicts), run.closing, run.exact_from()) == (1, CLOSING, 0)
    seqs = [json.loads(line)["seq"] for line in (folder / "run.jsonl").read_bytes().splitlines()]
    assert seqs == sorted(set(seqs))
    return run


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
def test_one_operation_that_fails_costs_nothing_whichever_it_is(number: int, tmp_path: Path, disk: Disk) -> None:
    """SQLite's way: fail the first operation, then the second, until there is none left to fail."""
    for at in itertools.count():
        folder = tmp_path / "runs" / f"run{at}"
        tell(folder, story(), disk, lambda i, at=at: number if i == at else None)  # type: ignore[misc]
        assert complete(folder, story()).problems == []
        assert {path.name for path in folder.iterdir()} == {"run.jsonl", "tables.f32"}
        if disk.num <= at:
            break
    assert at > 40


@pytest.mark.parametrize("number", ERRORS, ids=lambda number: errno.errorcode[number])
def test_an_outage_costs_nothing_whenever_it_begins(number: int, tmp_path: Path, disk: Disk) -> None:
    for at in range(0, 120, 3):
        folder = tmp_path / "runs" / f"run{at}"
        tell(folder, story(), disk, lambda i, at=at: number if at <= i < at + 25 else None)  # type: ignore[misc]
        assert complete(folder, story()).problems == []


def test_writes_that_take_only_a_part_are_completed(tmp_path: Path, disk: Disk) -> None:
    disk.short = True
    folder = tmp_path / "runs" / "run"
    tell(folder, story(), disk, lambda i: None)
    assert complete(folder, story()).problems == []


def test_a_write_of_nothing_is_a_failure_and_no_endless_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path / "run")
    writer.write(INFO)
    monkeypatch.setattr(os, "write", lambda fd, data: 0)
    with pytest.raises(OSError, match="wrote none"):
        writer.flush()


@pytest.mark.parametrize("num", [0, 1, 5])
@pytest.mark.parametrize("what", ["folder", "parent", "lines", "tables", "emptied"])
def test_a_record_that_was_deleted_is_begun_again_and_says_so(
    what: str, num: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "runs" / "run"
    writer = RunWriter(folder)
    writer.open(INFO)
    writer.write(INFO)  # the very same, as every sink gets it: it is there already
    for i in range(num):
        writer.write(sample(i, value=i))
    writer.flush()
    if what in ("folder", "parent"):
        shutil.rmtree(folder if what == "folder" else folder.parent)
    elif what == "emptied":
        os.truncate(folder / "run.jsonl", 0)
    elif num or what == "lines":
        (folder / {"lines": "run.jsonl", "tables": "tables.f32"}[what]).unlink()
    for i in range(num, num + 4):
        writer.write(sample(i, value=i, lay=FULL if i == num + 2 else layout()))
        writer.flush()
    writer.write(CLOSING)
    writer.close()
    run = read_run(folder)
    assert run.info is not None
    assert run.info.run_id == "r1"
    assert run.closing == CLOSING
    new = [s for s in run.samples() if s.step >= num]
    assert [(s.step, float(s.table[0, 0])) for s in new] == [(i, float(i)) for i in range(num, num + 4)]
    seqs = [json.loads(line)["seq"] for line in (folder / "run.jsonl").read_bytes().splitlines()]
    assert seqs == sorted(set(seqs))
    if what == "tables":
        assert len(run) == num + 4
        assert run.problems == ([f"{num} samples lost their table, the first at step 0"] if num else [])
    else:
        assert len(run) == 4
        steps = {0: "0 other lines", 1: "1 samples of step 0", 5: "5 samples of steps 0 to 4"}[num]
        assert run.problems == [f"{steps} are lost: its folder was deleted"]
        assert steps in caplog.text


def test_a_folder_that_cannot_be_made_again_yet_is_made_later(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "run"
    writer = RunWriter(folder)
    writer.open(INFO)
    writer.write(sample(0))
    writer.flush()
    shutil.rmtree(folder.parent)
    folder.parent.write_text("in the way")
    for i in range(1, 4):
        writer.write(sample(i))
        with pytest.raises(OSError):
            writer.flush()
    folder.parent.unlink()
    writer.close()
    assert [s.step for s in read_run(folder).samples()] == [1, 2, 3]


def test_a_working_directory_that_changes_moves_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writer = RunWriter(Path("runs") / "run")
    writer.open(INFO)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    writer.write(sample(0))
    writer.close()
    assert len(read_run(tmp_path / "runs" / "run")) == 1
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_that_somebody_cut_short_goes_on_with_a_line_of_its_own(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run")
    for record in [INFO, *(sample(i) for i in range(5))]:
        writer.write(record)
    writer.flush()
    path = tmp_path / "run" / "run.jsonl"
    os.truncate(path, path.stat().st_size - 10)
    writer.write(sample(5))
    writer.close()
    run = read_run(tmp_path / "run")
    assert [s.step for s in run.samples()] == [0, 1, 2, 3, 5]
    assert len(run.problems) == 1
    assert "is damaged" in run.problems[0]


def test_memory_is_bounded_and_what_was_given_up_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_module, "_MAX_PENDING_BYTES", 20_000)
    folder = tmp_path / "runs" / "run"
    writer = RunWriter(folder)
    writer.open(INFO)
    writer.write(sample(0))
    writer.flush()
    disk.broken = lambda i: errno.ENOSPC
    for i in range(1, 2_000):
        writer.write(sample(i))
        writer.write(verdict(i, streak=i))
        if i % 100 == 0:
            writer.write(verdict(i))
        with contextlib.suppress(OSError):
            writer.flush()
        assert writer._num_pending < 21_000
    disk.broken = lambda i: None
    writer.write(sample(2_000))
    writer.write(CLOSING)
    writer.close()
    run = read_run(folder)
    steps = [s.step for s in run.samples()]
    assert steps[0] == 0
    assert steps[-1] == 2_000
    assert run.closing == CLOSING
    assert [v.step for v in run.verdicts if v.findings[0].streak == 1] == [1, *range(100, 2_000, 100)]
    (problem,) = run.problems
    assert problem.startswith(f"{2_001 - len(steps):,} samples of steps 1 to ")
    assert "are lost: the disk refused to take them" in problem
    assert problem in caplog.text
    assert run.exact_from() == steps[1]
    assert all(len(s.table) for s in run.samples())


def test_even_findings_have_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk) -> None:
    monkeypatch.setattr(writer_module, "_MAX_PENDING_BYTES", 20_000)
    writer = RunWriter(tmp_path / "runs" / "run")
    writer.open(INFO)
    disk.broken = lambda i: errno.EIO
    for i in range(1_000):
        writer.write(verdict(i))
        assert writer._num_pending < 21_000
    disk.broken = lambda i: None
    writer.write(CLOSING)
    writer.close()
    run = read_run(tmp_path / "runs" / "run")
    assert run.verdicts[-1].step == 999
    assert run.problems == [f"{1_000 - len(run.verdicts)} other lines are lost: the disk refused to take them"]


def test_a_long_outage_under_a_recorder_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    """It was the end of the record after 20 attempts, 5 seconds in all."""
    monkeypatch.setattr(outlet_module, "FIRST_PAUSE_S", 0.0)
    folder = tmp_path / "runs" / "run"
    writer = RunWriter(folder)
    writer.open(INFO)
    recorder = Recorder([("run files", writer)])
    for i in range(10):
        recorder.put(sample(i))
    assert recorder.flush(LONG_S)
    disk.broken = lambda i: errno.ENOSPC
    for i in range(10, 60):
        recorder.put(sample(i))
        assert recorder.flush(LONG_S)
    assert "No space left" in recorder.failures["run files"]
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    disk.broken = lambda i: None
    for i in range(60, 70):
        recorder.put(sample(i))
    recorder.put(CLOSING)
    recorder.close(LONG_S)
    run = read_run(folder)
    assert [s.step for s in run.samples()] == list(range(70))
    assert (run.problems, run.closing) == ([], CLOSING)


# -- the beginning -------------------------------------------------------------------------------------------------


def test_there_is_no_folder_without_its_first_line(tmp_path: Path, disk: Disk) -> None:
    """Whatever operation a process is killed at: what is there by then can be read."""

    class Killed(BaseException):
        pass

    def dead(i: int) -> int | None:
        if i >= at:
            raise Killed
        return None

    for at in itertools.count():
        parent = tmp_path / "runs" / str(at)
        disk.num, disk.broken = 0, dead
        with contextlib.suppress(Killed):
            RunWriter(parent / "run").open(INFO)
        disk.broken = lambda i: None
        for folder in parent.glob("[!.]*"):
            found = read_run(folder).info
            assert found is not None
            assert found.run_id == "r1"
        if disk.num < at:
            break
    assert at > 4


def test_an_existing_folder_of_the_users_is_used_and_a_record_in_it_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("mine")
    first, second = RunWriter(tmp_path / "run"), RunWriter(tmp_path / "run")
    first.open(INFO)
    with pytest.raises(FileExistsError):  # two processes at the same moment
        second.open(RunInfo(**{name: getattr(INFO, name) for name in RunInfo.__slots__} | {"run_id": "r2"}))
    run = read_run(tmp_path / "run")
    assert run.info is not None
    assert run.info.run_id == "r1"
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"notes.txt", "run.jsonl"}


def test_what_a_killed_process_left_behind_is_cleared_away_in_time(tmp_path: Path) -> None:
    old, new = tmp_path / ".a.1.new", tmp_path / ".b.2.new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    RunWriter(tmp_path / "run").open(INFO)
    assert {path.name for path in tmp_path.iterdir()} == {".b.2.new", "run"}


# -- other files ---------------------------------------------------------------------------------------------------


def test_a_csv_file_that_was_deleted_has_its_header_again(tmp_path: Path) -> None:
    sink = CsvSink(tmp_path / "out" / "steps.csv")
    sink.write(sample(0))
    sink.flush()
    shutil.rmtree(tmp_path / "out")
    sink.write(sample(1))
    sink.close()
    lines = (tmp_path / "out" / "steps.csv").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("step,branch,optimizer,phase")
    assert lines[1].startswith("1,")


def test_rows_of_a_csv_file_are_bounded_while_they_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("trimtab.record.csv_sink.MAX_ROWS", 10)
    sink = CsvSink(tmp_path / "steps.csv")
    for i in range(25):
        sink.write(sample(i))
    sink.close()
    rows = (tmp_path / "steps.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(15, 25))
    assert "15 rows" in caplog.text


def test_a_sink_that_is_fine_hears_nothing_of_its_neighbours_outage(tmp_path: Path, disk: Disk) -> None:
    keep, writer = Keep(), RunWriter(tmp_path / "runs" / "run")
    writer.open(INFO)
    disk.broken = lambda i: errno.EIO
    recorder = Recorder([("run files", writer), ("keep", keep)])
    for i in range(50):
        recorder.put(sample(i))
    recorder.close(LONG_S)
    assert len(keep.records) == 50
