from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from tests.record.record_fakes import CLOSING, EVENTS, Blocked, Keep, sample, verdict
from trimtab.core.types import Record, Sample, Verdict
from trimtab.record import recorder as outlet_module
from trimtab.record import recorder as recorder_module
from trimtab.record.reader import read_run
from trimtab.record.recorder import Recorder
from trimtab.record.writer import RunWriter

LONG_S = 60.0  # a limit for what should be immediate: reached only when broken


class Raising(Keep):
    """Fails whenever `broken` says so."""

    def __init__(self, error: BaseException, method: str = "write") -> None:
        super().__init__()
        self.broken = True
        self.calls = 0
        self._error = error
        self._method = method

    def write(self, record: Record) -> None:
        if self._method == "write":
            self._fail()
        super().write(record)

    def flush(self) -> None:
        if self._method == "flush":
            self._fail()

    def close(self) -> None:
        if self._method == "close":
            self._fail()
        super().close()

    def _fail(self) -> None:
        self.calls += 1
        if self.broken:
            raise self._error


def test_every_sink_gets_everything_in_order() -> None:
    sinks = [Keep(), Keep()]
    recorder = Recorder([("a", sinks[0]), ("a", sinks[1])])
    records: list[Record] = [sample(i) for i in range(500)] + EVENTS + [CLOSING]
    for record in records:
        recorder.put(record)
    recorder.close(LONG_S)
    recorder.close(LONG_S)
    for sink in sinks:
        assert sink.records == records
        assert sink.closed == 1
        assert sink.flushed >= 1
    assert recorder.dropped == {}
    assert recorder.failures == {}
    recorder.put(sample(1))
    assert recorder.flush()
    assert len(sinks[0].records) == len(records)


def test_a_hanging_sink_holds_up_nobody(caplog: pytest.LogCaptureFixture) -> None:
    stuck, fine = Blocked(), Keep()
    recorder = Recorder([("stuck", stuck), ("fine", fine)], queue_size=300, flush_s=0.001)
    recorder.put(verdict(0))
    assert stuck.inside.wait(LONG_S)
    for i in range(5_000):
        recorder.put(sample(i))
        if i % 50 == 0:
            recorder.put(verdict(i))
            recorder.put(Verdict(step=i, seen_at=i))
    assert not stuck.gate.is_set()  # every put returned while it hung
    assert not recorder.flush(0.0)
    recorder.close(0.05)
    assert "sink 'stuck' did not finish within 0.05 s" in caplog.text
    assert recorder._core.pump is not None
    recorder._core.pump.join(LONG_S)
    assert recorder.dropped["stuck"] >= 4_000
    stuck.gate.set()
    thread = recorder._core.outlets[0]._thread
    assert thread is not None
    thread.join(LONG_S)
    findings = [r for r in stuck.records if isinstance(r, Verdict) and r.findings]
    assert len(findings) == 101  # never dropped
    kept = [r.step for r in stuck.records if isinstance(r, Sample)]
    assert kept == sorted(kept)
    assert kept[-1] == 4_999  # the oldest went
    assert len(kept) + recorder.dropped["stuck"] == 5_000


def test_a_neighbour_of_a_hanging_sink_gets_everything() -> None:
    stuck, fine = Blocked(), Keep()
    recorder = Recorder([("stuck", stuck), ("fine", fine)], queue_size=100_000)
    for i in range(2_000):
        recorder.put(sample(i))
    recorder._core.stop()
    assert recorder._core.pump is not None
    recorder._core.pump.join(LONG_S)
    thread = recorder._core.outlets[1]._thread
    assert thread is not None
    thread.join(LONG_S)
    assert [r.step for r in fine.records] == list(range(2_000))  # type: ignore[union-attr]
    stuck.gate.set()
    recorder.close(LONG_S)
    assert len(stuck.records) == 2_000


def test_a_raising_sink_is_reported_once_and_recovers(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Raising(OSError("disk on fire")), Keep()
    recorder = Recorder([("bad", bad), ("good", good)])
    for i in range(5):
        recorder.put(sample(i))
    assert recorder.flush(LONG_S)
    bad.broken = False
    for i in range(5, 8):
        recorder.put(sample(i))
    recorder.close(LONG_S)
    assert [r.step for r in bad.records] == [5, 6, 7]  # type: ignore[union-attr]
    assert len(good.records) == 8
    assert caplog.text.count("disk on fire") == 1
    assert "training goes on" in caplog.text
    assert recorder.failures == {"bad": "write failed with OSError: disk on fire (5 times)"}


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
def test_a_sink_that_keeps_failing_gets_a_pause_and_goes_on_after_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(outlet_module, "FIRST_PAUSE_S", LONG_S * 60)
    monkeypatch.setattr(outlet_module, "LONGEST_PAUSE_S", LONG_S * 60)
    bad = Raising(error)
    recorder = Recorder([("bad", bad)])
    for i in range(100):
        recorder.put(sample(i))
    assert recorder.flush(LONG_S)  # nobody waits for the end of a pause
    assert bad.calls == outlet_module.MAX_FAILURES
    assert recorder.dropped["bad"] == outlet_module.MAX_FAILURES
    assert len([r for r in caplog.records if r.levelno == logging.WARNING]) == 1
    bad.broken = False
    (outlet,) = recorder._core.outlets
    outlet._troubles["write"].until_s = 0.0
    recorder.put(sample(100))
    recorder.close(LONG_S)
    assert [r.step for r in bad.records] == list(range(outlet_module.MAX_FAILURES, 101))  # type: ignore[union-attr]
    assert "works again" in caplog.text
    assert f"{outlet_module.MAX_FAILURES} records did not reach it" in caplog.text
    assert bad.closed == 1


def test_pauses_get_longer_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(outlet_module.time, "monotonic", lambda: now[0])
    outlet = outlet_module.Outlet("bad", Raising(OSError("full"), "flush"), 5)
    waits = []
    for _ in range(12):
        outlet._flush()
        waits.append(outlet._troubles["flush"].until_s - now[0])
        now[0] += 100.0
    assert waits[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert waits[-1] == outlet_module.LONGEST_PAUSE_S
    outlet.sink.broken = False  # type: ignore[attr-defined]
    outlet._flush()
    outlet.sink.broken = True  # type: ignore[attr-defined]
    outlet._flush()
    assert outlet._troubles["flush"].until_s - now[0] == pytest.approx(0.1)


def test_a_flush_that_keeps_failing_is_tried_again_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet_module, "FIRST_PAUSE_S", 0.0)
    bad = Raising(OSError("full"), "flush")
    recorder = Recorder([("bad", bad)])
    for i in range(5 * outlet_module.MAX_FAILURES):
        recorder.put(sample(i))
        assert recorder.flush(LONG_S)
    assert bad.calls >= 5 * outlet_module.MAX_FAILURES
    bad.broken = False
    recorder.put(sample(1_000))
    recorder.close(LONG_S)
    assert len(bad.records) == 5 * outlet_module.MAX_FAILURES + 1  # it collected all the while
    assert recorder.dropped == {}


def test_what_is_left_at_the_end_of_a_pause_is_tried_once_more_and_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outlet_module, "FIRST_PAUSE_S", LONG_S * 60)
    bad = Raising(OSError("full"), "close")
    bad.flush = bad.close  # type: ignore[method-assign]
    recorder = Recorder([("bad", bad)])
    recorder.put(sample(0))
    recorder.close(LONG_S)
    assert bad.calls == 2
    assert "could not be completed: close failed with OSError: full" in caplog.text


def test_a_close_that_fails_is_contained() -> None:
    bad = Raising(OSError("gone"), "close")
    recorder = Recorder([("bad", bad)])
    recorder.close(LONG_S)
    assert "close failed with OSError: gone" in recorder.failures["bad"]


def test_a_backlog_of_nothing_but_findings_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outlet_module, "MAX_BACKLOG", 50)
    stuck = Blocked()
    recorder = Recorder([("stuck", stuck)], queue_size=10)
    recorder.put(verdict(0))
    assert stuck.inside.wait(LONG_S)
    for i in range(100):
        recorder.put(verdict(i))
    with recorder._core.turn:  # else the pump may be on its way with a batch
        recorder._core._distribute()
    stuck.gate.set()
    recorder.put(verdict(100))
    recorder.close(LONG_S)
    assert "records that were waiting" in recorder.failures["stuck"]
    assert len(stuck.records) + recorder.dropped["stuck"] == 102
    assert stuck.records[-1] == verdict(100)  # it goes on with what came after


def test_no_thread_before_the_first_record_and_none_without_threads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = threading.active_count()
    keep = Keep()
    recorder = Recorder([("a", keep)], queue_size=100_000)
    assert threading.active_count() == before

    def refuse(_: Any) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        recorder.put(sample(0))
        recorder.put(sample(1))
        other = Recorder([("b", Keep())])
        other.close()
        outlet = outlet_module.Outlet("c", Keep(), 5)
        outlet.offer([sample(0)])
        outlet.offer([sample(0)])
        assert outlet.wait(0.0)
        for i in range(recorder_module._MAX_INBOX + 3):
            recorder.put(sample(i))
        assert recorder.flush()
    assert caplog.text.count("can't start new thread") == 3
    assert len(recorder._core.inbox) == recorder_module._MAX_INBOX
    recorder._core.start_at_s = 0.0  # by now there may be threads again
    recorder.put(sample(7))
    recorder.close(LONG_S)
    assert keep.records[-1].step == 7  # type: ignore[union-attr]
    assert len(keep.records) + recorder.dropped["a"] == recorder_module._MAX_INBOX + 6


def test_lane_that_never_ran_has_not_finished() -> None:
    assert not outlet_module.Outlet("c", Keep(), 5).wait(0.0)


def test_a_second_pump_does_no_harm() -> None:
    # Ctrl-C between the start of the pump and the note that it runs: the next put starts another.
    keep = Keep()
    recorder = Recorder([("a", keep)], flush_s=0.001)
    for i in range(300):
        if i in (50, 100):
            recorder._core.pump = None
        recorder.put(sample(i))
    recorder.close(LONG_S)
    assert [r.step for r in keep.records] == list(range(300))  # type: ignore[union-attr]
    assert keep.closed == 1


def test_a_recorder_can_be_collected_and_its_record_is_completed() -> None:
    keep = Keep()
    recorder = Recorder([("a", keep)])
    recorder.put(sample(0))
    core, ghost = recorder._core, weakref.ref(recorder)
    del recorder
    gc.collect()
    assert ghost() is None
    assert core in recorder_module._LIVE
    recorder_module.close_all()
    assert (len(keep.records), keep.closed) == (1, 1)
    assert core not in recorder_module._LIVE


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    recorder = Recorder([("run files", RunWriter(tmp_path))])
    recorder.put(sample(0))
    child = os.fork()
    if child == 0:  # another process
        code = 1
        try:
            recorder.put(sample(1))
            recorder.put(verdict(1))
            code = 0 if recorder.flush(0.0) and len(recorder._core.inbox) <= 1 else 2
            recorder.close(0.0)
            recorder_module.close_all()
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    recorder.put(sample(2))
    recorder.close(LONG_S)
    assert [s.step for s in read_run(tmp_path).samples()] == [0, 2]


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from tests.record.record_fakes import INFO, sample
from trimtab.record.recorder import Recorder
from trimtab.record.writer import RunWriter

recorder = Recorder([("run files", RunWriter(Path({folder!r})))], flush_s=30.0)
recorder.put(INFO)
step = 0
try:
    while True:
        recorder.put(sample(step))
        step += 1
        if step == 500:
            {end}
            print("ready", flush=True)
        if step > 500:
            import time
            time.sleep(0.001)
finally:
    print(step, flush=True)
"""


@pytest.mark.parametrize("end", ["pass", "sys.exit(4)", "1 / 0"])
def test_the_record_is_complete_after_ctrl_c_exit_and_exceptions(tmp_path: Path, end: str) -> None:
    script = SCRIPT.format(here=str(Path(__file__).parents[2]), folder=str(tmp_path / "run"), end=end)
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert process.stdout is not None
    if end == "pass":
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert ("KeyboardInterrupt" in errors) == (end == "pass")
    run = read_run(tmp_path / "run")
    steps = [s.step for s in run.samples()]
    assert steps == list(range(len(steps)))
    assert len(steps) - int(out.split()[-1]) in (0, 1)  # Ctrl-C may fall between put and the count
    assert run.problems == []
