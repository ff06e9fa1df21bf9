"""The records of processes that train together are one run: rank 0's folder, with those of the others inside it."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
import torch.distributed as dist

from trimtab.core.config import Config
from trimtab.core.types import Closing, Finding, RunInfo, Severity, Verdict
from trimtab.guard.run_record import folder_for, open_recorder
from trimtab.record.reader import find_run, ranks_in, read_run
from trimtab.report.html import to_html
from trimtab.report.summary import summarise
from trimtab.report.text import to_text
from trimtab.sample import reduce
from trimtab.sample.reduce import OneRun


def told(folder: Path | None) -> RunInfo:
    return RunInfo(
        run_id="" if folder is None else folder.name,
        started="2026-01-01T00:00:00+00:00",
        config={},
        versions={},
        model="Net",
        num_parameters=3,
        optimizers=("",),
        rules=(),
    )


def finding(code: str, step: int) -> Verdict:
    one = Finding(code=code, name=code.lower(), severity=Severity.WARN, step=step, message="it is so.")
    return Verdict(step=step, seen_at=step, findings=(one,))


def record(folder: Path, *verdicts: Verdict, killed: bool = False) -> None:
    recorder, where = open_recorder(Config(), folder, (), told, OneRun())
    assert where == folder
    for verdict in verdicts:
        recorder.put(verdict)
    recorder.put(Closing(steps={"": 10}, rejected=0, findings=len(verdicts), reason="closed", dropped={}))
    recorder.close()
    if killed:
        lines = (folder / "run.jsonl").read_text().splitlines(keepends=True)
        (folder / "run.jsonl").write_text("".join(line for line in lines if '"t":"close"' not in line))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_whoever_comes_first_all_record_to_one_folder(tmp_path: Path, order: tuple[int, ...]) -> None:
    store, config = dist.HashStore(), Config(dir=str(tmp_path))
    folders = {rank: folder_for(config, None, OneRun(store, rank)) for rank in order}
    first = folders[0]
    assert first is not None
    assert first.parent == tmp_path
    assert [folders[rank] for rank in (1, 2)] == [first / "rank-1", first / "rank-2"]


def test_the_next_guard_of_all_is_another_run(tmp_path: Path) -> None:
    store, config = dist.HashStore(), Config(dir=str(tmp_path))
    one, other = (folder_for(config, None, OneRun(store, 0, turn)) for turn in (0, 1))
    assert one != other
    assert folder_for(config, None, OneRun(store, 1, 1)) == other / "rank-1"  # type: ignore[operator]


def test_a_folder_that_all_were_given_is_that_of_rank_0(tmp_path: Path) -> None:
    store, given = dist.HashStore(), tmp_path / "a"
    record(given)  # an earlier run: this one goes beside it
    assert folder_for(Config(), given, OneRun(store, 0)) == tmp_path / "a-2"
    assert folder_for(Config(), given, OneRun(store, 1)) == tmp_path / "a-2" / "rank-1"


def test_folders_that_differ_stay_as_they_were_given(tmp_path: Path) -> None:
    store = dist.HashStore()
    assert folder_for(Config(), tmp_path / "rank0", OneRun(store, 0)) == tmp_path / "rank0"
    assert folder_for(Config(), tmp_path / "rank1", OneRun(store, 1)) == tmp_path / "rank1"


def test_where_rank_0_records_nothing_the_others_keep_their_folder(tmp_path: Path) -> None:
    store = dist.HashStore()
    assert folder_for(Config(), False, OneRun(store, 0)) is None
    assert folder_for(Config(), tmp_path / "a", OneRun(store, 1)) == tmp_path / "a"


def test_where_rank_0_has_no_guard_nobody_waits_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reduce, "PLACE_WAIT_S", 0.1)
    assert folder_for(Config(), tmp_path / "a", OneRun(dist.HashStore(), 1)) == tmp_path / "a"
    assert "rank 0 did not say" in caplog.text


def test_a_store_that_fails_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = OneRun(object(), 0)
    folder = folder_for(Config(dir=str(tmp_path)), None, one)
    assert folder is not None
    assert folder.parent == tmp_path
    assert "could not agree" in caplog.text


def test_the_report_says_what_each_rank_found(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-000000-00001-0a1b"
    record(folder, finding("LOSS001", 4))
    record(folder / "rank-1", finding("LOSS001", 4))
    record(folder / "rank-2", finding("LOSS001", 4), finding("DATA004", 7))
    record(folder / "rank-10", killed=True)
    (folder / "rank-11").mkdir()
    assert list(ranks_in(folder)) == [1, 2, 10]
    assert find_run(tmp_path) == find_run(folder) == folder
    summary = summarise(read_run(folder))
    line = (
        "4 ranks: rank 2 also found DATA004 at step 7; rank 10 did not find LOSS001 at step 4 and did not close its "
        "record; the others found what rank 0 did."
    )
    assert line in to_text(summary, 400).replace("\n", " ")
    assert line in to_html(read_run(folder))
    assert summarise(read_run(folder / "rank-1")).ranks == ()


def test_all_the_same_is_said_in_a_word(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "rank-1"):
        record(folder, finding("LOSS001", 4))
    assert "2 ranks: all found the same." in to_text(summarise(read_run(tmp_path)))


def test_where_rank_0_recorded_elsewhere_the_first_rank_here_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-000000-00001-0a1b"
    record(folder / "rank-10")
    record(folder / "rank-9")
    assert find_run(tmp_path) == find_run(folder) == folder / "rank-9"
