from __future__ import annotations

import errno
import json
import os
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.matrix import sampled
from tests.record.record_fakes import CLOSING, FULL, INFO, LAYOUT, finding, layout, same, sample, small_run, verdict
from trimtab.core.errors import RecordError
from trimtab.core.types import BrainState, Record, RunInfo, Sample, Verdict
from trimtab.record import writer as writer_module
from trimtab.record.reader import Run, find_run, read_run
from trimtab.record.writer import RunWriter


def write(folder: Path, records: list[Record], **options: Any) -> RunWriter:
    writer = RunWriter(folder, **options)
    for record in records:
        writer.write(record)
    writer.close()
    return writer


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_everything_comes_back(tmp_path: Path) -> None:
    records = small_run()
    write(tmp_path / "a" / "run", records)
    run = read_run(tmp_path / "a" / "run")
    assert repr(run.info) == repr(INFO)
    wanted = [record for record in records if isinstance(record, Sample)]
    assert len(run) == len(wanted)
    assert all(same(a, b) for a, b in zip(run.samples(), wanted, strict=True))
    assert repr([*run.decisions, *run.outcomes, *run.states, run.closing]) == repr([*records[6:9], CLOSING])
    assert run.verdicts == [verdict(2)]
    assert run.findings == [finding(2)]
    assert (run.problems, run.thinned, run.exact_from(), run.optimizers) == ([], None, 0, ("",))
    steps, values = run.series("loss")
    assert steps.dtype == np.int64
    assert values.tolist() == [0.0, 1.5, 3.0, 4.5, -np.inf]
    assert steps.tolist() == [0, 1, 2, 3, 4]
    assert repr(run) == "<trimtab.Run r1: 5 steps, 1 finding, done>"
    seqs = [json.loads(line)["seq"] for line in (run.folder / "run.jsonl").read_bytes().splitlines()]
    assert seqs == sorted(set(seqs))


def test_layouts_are_written_once_and_quiet_verdicts_never(tmp_path: Path) -> None:
    records: list[Record] = [sample(i, lay=layout()) for i in range(100)]
    write(tmp_path, [LAYOUT, *records, Verdict(step=1, seen_at=2)])
    text = (tmp_path / "run.jsonl").read_text()
    assert text.count('"t":"layout"') == 1
    assert '"t":"verdict"' not in text
    assert read_run(tmp_path).info is None
    assert repr(read_run(tmp_path)).startswith(f"<trimtab.Run {tmp_path.name}")


def test_series_tell_optimizers_and_phases_apart(tmp_path: Path) -> None:
    disc = layout(optimizer="disc")
    records = [sample(0, loss=1.0), sample(5, lay=disc, loss=2.0), sample(0, phase="val", loss=3.0)]
    write(tmp_path, [*records])
    run = read_run(tmp_path)
    assert run.optimizers == ("", "disc")
    assert [run.series("loss", o, p)[1].tolist() for o, p in [("", "train"), ("disc", "train"), ("", "val")]] == [
        [1.0],
        [2.0],
        [3.0],
    ]
    assert (run.exact_from(), run.exact_from("disc"), run.exact_from("none")) == (0, 5, None)
    assert run.series("nothing")[0].size == 0


@pytest.mark.parametrize("stride", sampled({"all": 1, "every 17th": 17}, ["every 17th"]))
def test_truncation_at_every_byte_of_the_lines(stride: int, tmp_path: Path) -> None:
    write(tmp_path / "full", small_run())
    data = (tmp_path / "full" / "run.jsonl").read_bytes()
    whole = read_run(tmp_path / "full")
    cut = tmp_path / "cut"
    shutil.copytree(tmp_path / "full", cut)
    for end in range(1, len(data), stride):
        (cut / "run.jsonl").write_bytes(data[:end])
        run = read_run(cut)
        kept = data[:end].count(b"\n")
        complete = data[:end].endswith(b"\n") or data[end : end + 1] == b"\n"  # only its line end is missing
        lines = [
            json.loads(line)["t"] for line in data.splitlines()[: kept + (complete and data[end - 1 : end] != b"\n")]
        ]
        assert len(run) == lines.count("sample"), end
        assert (run.problems == []) == complete, end
        assert all(same(a, b) for a, b in zip(run.samples(), whole.samples(), strict=False))
        # and it can be continued without losing a whole line
        again = tmp_path / "again"
        shutil.copytree(cut, again)
        write(again, [sample(99)])
        assert len(read_run(again)) == len(run) + 1
        assert read_run(again).problems == []
        shutil.rmtree(again)


def test_truncation_at_every_byte_of_the_tables(tmp_path: Path) -> None:
    write(tmp_path / "full", small_run())
    data = (tmp_path / "full" / "tables.f32").read_bytes()
    wanted = list(read_run(tmp_path / "full").samples())
    for end in range(len(data)):
        (tmp_path / "full" / "tables.f32").write_bytes(data[:end])
        run = read_run(tmp_path / "full")
        assert run.problems
        lost = 0
        for a, b in zip(run.samples(), wanted, strict=True):
            lost += a.table.shape[0] == 0
            assert a.scalars.keys() == b.scalars.keys()
            assert a.table.shape[0] == len(a.layout.names)
        tables_before = [i for i in range(4) if (i + 1) * 52 <= end]
        assert lost == 5 - len(tables_before)
        assert run.exact_from() is None
    again = write(tmp_path / "full", [sample(5)])
    run = read_run(again.folder)
    assert (len(run), run.exact_from()) == (6, 5)


def test_byte_flips_never_crash_the_reader(tmp_path: Path) -> None:
    write(tmp_path, small_run())
    lines, tables = tmp_path / "run.jsonl", tmp_path / "tables.f32"
    rng = random.Random(0)
    for path in (lines, tables):
        good = path.read_bytes()
        for trial in range(400):
            bad = bytearray(good)
            for _ in range(1 if trial % 2 else 5):
                bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
            path.write_bytes(bytes(bad))
            try:
                run = read_run(tmp_path)
            except RecordError as error:
                if "upgrade" in str(error):  # the version itself was hit
                    continue
                raise
            assert sum(1 for _ in run.samples()) == len(run)
            assert isinstance(run.exact_from(), int | None)
            run.series("loss")
            if path is tables:
                assert run.problems
        path.write_bytes(good)


def test_a_damaged_line_is_named_and_skipped(tmp_path: Path) -> None:
    write(tmp_path, [INFO, *(sample(i) for i in range(6))])
    path = tmp_path / "run.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[4] = b"garbage" + lines[4]
    lines.insert(6, b'{"t":"future","seq":99}\n')
    path.write_bytes(b"".join(lines))
    run = read_run(tmp_path)
    assert [s.step for s in run.samples()] == [0, 1, 3, 4, 5]
    assert "line 5 is damaged" in run.problems[0]
    assert "unknown" in run.problems[1]
    assert run.exact_from() == 3


def test_noise_is_summarised(tmp_path: Path) -> None:
    write(tmp_path, [INFO])
    with (tmp_path / "run.jsonl").open("ab") as file:
        file.write(b"noise\n" * 500)
    assert len(read_run(tmp_path).problems) == 101


def test_a_sample_without_its_layout_is_reported(tmp_path: Path) -> None:
    write(tmp_path, [INFO, sample(0), sample(1)])
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(line for line in path.read_bytes().splitlines(True) if b'"t":"layout"' not in line))
    run = read_run(tmp_path)
    assert len(run) == 0
    assert "layout" in run.problems[0]
    write(tmp_path, [sample(2)])  # a new layout line must not take the lost one's number
    assert [s.step for s in read_run(tmp_path).samples()] == [2]


def test_missing_and_unreadable_tables(tmp_path: Path) -> None:
    write(tmp_path, [INFO, sample(0), sample(1)])
    (tmp_path / "tables.f32").unlink()
    run = read_run(tmp_path)
    assert [s.table.shape for s in run.samples()] == [(0, 1), (0, 1)]
    assert run.problems == ["tables.f32 is missing: samples come without their tables"]
    (tmp_path / "tables.f32").mkdir()
    assert "cannot be read" in read_run(tmp_path).problems[0]


def test_samples_without_rows_need_no_tables(tmp_path: Path) -> None:
    bare = Sample(step=0, layout=LAYOUT, table=np.empty((0, 1), np.float32), scalars={"loss": 1.0})
    write(tmp_path, [bare])
    assert not (tmp_path / "tables.f32").exists()
    run = read_run(tmp_path)
    assert same(next(run.samples()), bare)
    assert (run.problems, run.exact_from()) == ([], 0)


def test_reopening_continues(tmp_path: Path) -> None:
    write(tmp_path, [INFO, sample(0)])
    write(tmp_path, [INFO, sample(1, lay=layout()), sample(2, lay=FULL)])
    run = read_run(tmp_path)
    assert [s.step for s in run.samples()] == [0, 1, 2]
    assert len(run.layouts) == 2
    seqs = [json.loads(line)["seq"] for line in (tmp_path / "run.jsonl").read_bytes().splitlines()]
    assert seqs == sorted(set(seqs))
    assert run.problems == []


def test_a_table_whose_line_was_lost_does_not_lend_itself_to_another(tmp_path: Path) -> None:
    write(tmp_path, [INFO, sample(0, value=1.0), sample(1, value=2.0)])
    path = tmp_path / "run.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1]))
    write(tmp_path, [sample(1, value=3.0)])
    assert [float(s.table[0, 0]) for s in read_run(tmp_path).samples()] == [1.0, 3.0]


@pytest.mark.parametrize("text", [b'{"loss": 1.0}\n', b"hello", b"\n\n", b'[1]\n{"t": 1}\n'])
def test_foreign_files_are_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "run.jsonl").write_bytes(text)
    with pytest.raises(RecordError, match="not a record of trimtab"):
        RunWriter(tmp_path)
    with pytest.raises(RecordError, match="not a record of trimtab"):
        read_run(tmp_path)
    assert (tmp_path / "run.jsonl").read_bytes() == text


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [INFO])
    path = tmp_path / "run.jsonl"
    path.write_text(path.read_text().replace('"version":[1,1]', '"version":[2,0]'))
    for open_it in (read_run, RunWriter):
        with pytest.raises(RecordError, match="format 2"):
            open_it(tmp_path)


def test_errors_say_where_runs_are(tmp_path: Path) -> None:
    write(tmp_path / "runs" / "one", [INFO])
    with pytest.raises(RecordError, match=r"no folder.*runs nearby.*one"):
        read_run(tmp_path / "runs" / "typo")
    with pytest.raises(RecordError, match=r"holds no run.jsonl.*one"):
        read_run(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "run.jsonl").touch()
    with pytest.raises(RecordError, match="empty"):
        read_run(tmp_path / "empty")
    with pytest.raises(RecordError, match="no folder"):
        read_run(tmp_path / "empty" / "run.jsonl")
    with pytest.raises(RecordError, match="no run nearby"):
        find_run(tmp_path / "a" / "b" / "c")


def test_find_run_takes_the_newest_by_its_own_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def info(started: str) -> RunInfo:
        return RunInfo(**{name: getattr(INFO, name) for name in RunInfo.__slots__} | {"started": started})

    runs = tmp_path / "runs"
    write(runs / "new", [info("2026-03-01T00:00:00+00:00")])
    write(runs / "old", [info("2026-03-01T01:00:00+02:00")])
    write(runs / "unknown", [sample(0)])
    write(runs / "odd", [info("yesterday")])
    os.utime(runs / "old" / "run.jsonl")
    for path in (runs, runs / "new", runs / "new" / "run.jsonl", tmp_path):
        assert find_run(path) == runs / "new"
    monkeypatch.chdir(tmp_path)
    assert find_run("last") == Path("runs/new") == find_run()


def test_a_live_run_can_be_read_at_any_time(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, max_bytes=60_000)  # small enough to be thinned under the reader's eyes
    writer.write(INFO)
    writer.flush()
    done = threading.Event()

    def keep_writing() -> None:
        for i in range(2_000):
            writer.write(sample(i))
            if i % 7 == 0:
                writer.flush()
        writer.close()
        done.set()

    thread = threading.Thread(target=keep_writing)
    thread.start()
    last = -1
    while True:
        finished = done.is_set()
        run = read_run(tmp_path)
        steps = [s.step for s in run.samples()]
        assert steps == sorted(steps)
        assert not steps or steps[-1] >= last
        last = steps[-1] if steps else last
        if finished:
            break
    thread.join()
    assert last == 1_999
    assert read_run(tmp_path).problems == []


def spiky(i: int) -> Sample:
    if i == 300:
        return sample(i, loss=500.0, grad_norm=1.0)
    if i == 700:
        return sample(i, loss=1.0, grad_norm=float("nan"))
    if i == 1_100:
        return sample(i, value=900.0, loss=1.0, grad_norm=900.0)
    if i == 1_500:
        return sample(i, value=float("inf"), loss=1.0, grad_norm=1.0)
    return sample(i, loss=1.0 + i % 3 / 10, grad_norm=1.0)


def test_thinning_keeps_the_bound_the_extremes_and_the_findings(tmp_path: Path) -> None:
    bound = 40_000
    writer = RunWriter(tmp_path, max_bytes=bound)
    writer.write(INFO)
    exact_before = 0
    for i in range(3_000):
        writer.write(spiky(i))
        if i in (20, 21, 1_700):
            writer.write(verdict(i))
        if i % 100 == 0:
            writer.write(BrainState(step=i, state={"n": i}))
        writer.flush()
        assert size(tmp_path) <= bound
        if i % 500 == 0:
            run = read_run(tmp_path)
            assert run.problems == []
            exact = run.exact_from()
            assert exact is not None
            assert exact >= exact_before
            exact_before = exact
    run = read_run(tmp_path)
    by_step = {s.step: s for s in run.samples()}
    assert {20, 21, 1_700, 300, 700, 1_100, 2_999} <= by_step.keys()
    assert all(len(by_step[step].table) for step in (20, 21, 1_700, 1_100))
    assert [v.step for v in run.verdicts] == [20, 21, 1_700]
    old = [step for step in by_step if step < 1_000]
    assert len(old) > 5  # coarse, not empty
    exact = run.exact_from()
    assert exact is not None
    assert 0 < exact < 2_999
    steps = [s.step for s in run.samples() if s.step >= exact]
    assert steps == list(range(exact, 3_000))
    assert all(len(by_step[step].table) for step in steps)
    assert exact - 1 not in by_step or not len(by_step[exact - 1].table)
    assert all(state.step >= exact - 100 for state in run.states)
    assert run.thinned is not None
    assert run.thinned.samples + len(run) == 3_000
    assert run.thinned.tables + sum(1 for s in run.samples() if len(s.table)) == 3_000
    assert run.thinned.complete[""][1] == exact
    text = (tmp_path / "run.jsonl").read_text()
    assert text.count('"t":"thinned"') == 1
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "tables.f32"}


def test_thinning_leaves_extreme_tables_when_tables_are_the_larger_part(tmp_path: Path) -> None:
    wide = layout(rows=200)
    writer = RunWriter(tmp_path, max_bytes=400_000)
    for i in range(2_000):
        writer.write(sample(i, lay=wide, value={501: 77.0, 802: float("nan")}.get(i, 1.0), loss=1.0))
    writer.write(sample(2_000, lay=layout(rows=2, optimizer="other"), loss=1.0))
    writer.flush()
    run = read_run(tmp_path)
    assert size(tmp_path) < 0.75 * 400_000
    assert run.problems == []
    assert len(run) == 2_001  # the scalars fit
    kept = [s.step for s in run.samples() if len(s.table)]
    assert {501, 802} <= set(kept)
    assert run.exact_from("other") == 2_000


def test_a_run_of_nothing_but_findings_keeps_the_first_of_each_incident(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, max_bytes=200_000)
    for i in range(300):
        writer.write(sample(i, lay=layout(rows=500)))
        writer.write(verdict(i, streak=1 + i % 50))
    writer.flush()
    assert size(tmp_path) < 200_000
    first = {s.step for s in read_run(tmp_path).samples() if len(s.table)}
    assert {0, 50, 100, 150, 200, 250} <= first


def test_what_cannot_be_thinned_is_not_tried_at_every_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = writer_module.thin
    monkeypatch.setattr(writer_module, "thin", lambda *a, **k: (calls.append(1), real(*a, **k)))
    writer = RunWriter(tmp_path, max_bytes=2_000)
    for i in range(300):
        writer.write(verdict(i))
        writer.flush()
    assert 1 <= len(calls) < 30
    assert len(read_run(tmp_path).verdicts) == 300


def test_thinning_keeps_damaged_lines_and_drops_orphans(tmp_path: Path) -> None:
    write(tmp_path, [INFO, *(sample(i) for i in range(50))])
    path = tmp_path / "run.jsonl"
    lines = path.read_bytes().splitlines(True)
    lines[3] = b'{"t":"sample","seq":oops\n'
    lines[-1] = b'{"t":"state","seq":60,"x":1}\n'
    path.write_bytes(b"".join(lines))
    write(tmp_path, [sample(50)], max_bytes=5_000)
    assert size(tmp_path) < 5_000
    assert b"oops" in path.read_bytes()
    run = read_run(tmp_path)
    assert run.thinned is not None


def test_thinning_copes_without_tables(tmp_path: Path) -> None:
    bare = np.empty((0, 1), np.float32)
    many = [Sample(step=i, layout=LAYOUT, table=bare, scalars={"loss": 0.0}) for i in range(200)]
    write(tmp_path, [*many], max_bytes=10_000)
    assert size(tmp_path) < 10_000
    assert not (tmp_path / "tables.f32").exists()


def test_large_batches_do_not_wait_for_a_flush(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    for i in range(4):
        writer.write(sample(i, lay=layout(rows=100_000)))
    assert (tmp_path / "tables.f32").stat().st_size > 1_000_000


def refuse(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_thinning_that_fails_leaves_the_record_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "replace", refuse)
    writer = RunWriter(tmp_path, max_bytes=5_000)
    for i in range(60):
        writer.write(sample(i))
    with pytest.raises(OSError):
        writer.flush()
    writer.flush()
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"run.jsonl", "tables.f32"}
    assert len(read_run(tmp_path)) == 60


def test_a_forked_writer_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = RunWriter(tmp_path)
    writer.write(INFO)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        writer.write(sample(0))
        writer.flush()
        writer.close()
        assert list(tmp_path.iterdir()) == []
    writer.close()
    assert len(read_run(tmp_path)) == 0


def test_many_fresh_layouts_do_not_pile_up(tmp_path: Path) -> None:
    writer = write(tmp_path, [sample(i, lay=layout()) for i in range(200)])
    assert len(writer._seen) <= 64


def test_branches_and_gaps(tmp_path: Path) -> None:
    def at(step: int, branch: int) -> Sample:
        return Sample(step=step, branch=branch, layout=LAYOUT, table=np.ones((3, 1), np.float32), scalars={})

    write(tmp_path / "a", [at(0, 0), at(1, 0), at(2, 0), at(1, 1), at(2, 1)])
    run: Run = read_run(tmp_path / "a")
    assert run.exact_from() == 0
    assert [(s.branch, s.step) for s in run.samples()] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
    write(tmp_path / "b", [at(0, 0), at(1, 0), at(4, 0), at(5, 0)])
    assert read_run(tmp_path / "b").exact_from() == 4
