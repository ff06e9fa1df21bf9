from __future__ import annotations

import csv
import io
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.record.record_fakes import CUT, EVENTS, FULL, INF, INFO, LAYOUT, NAN, Keep, finding, layout, sample, verdict
from trimtab.core.errors import InputError
from trimtab.core.types import ABSENT, Outcome, Sample, Severity, Verdict
from trimtab.integrations.loggers.metric_sink import MetricSink
from trimtab.record.csv_sink import layer_metrics, metrics
from trimtab.record.sinks import (
    CallSink,
    ConsoleSink,
    CsvSink,
    LoggerSink,
    adapt,
)
from trimtab.record.writer import RunWriter


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- metrics


def test_metrics_of_a_full_training_sample() -> None:
    table = np.zeros((3, 7), np.float32)
    table[:, 0] = [3.0, ABSENT, 5.0]
    table[:, 2] = [0.5, 0.0, 0.25]
    table[0, 3] = 2.0  # two NaNs
    table[1, 4] = 9.0  # of an absent gradient: not looked at
    scalars = {"loss": 2.0, "grad_norm": 4.0, "clip_coef": 0.25, "lr/0": 0.1, "lr/1": 0.2, "update_ratio": 1e-3}
    scalars |= {"weight_norm": 7.0, "scale": 65536.0, "rejected": 1.0, "private": 5.0}
    given = Sample(step=1, layout=FULL, table=table, scalars=scalars)
    assert metrics(given) == {
        "loss": 2.0,
        "grad/global_norm": 4.0,
        "grad/global_norm_clipped": 1.0,
        "grad/clip_coef": 0.25,
        "lr": 0.1,
        "lr/0": 0.1,
        "lr/1": 0.2,
        "update/ratio": 1e-3,
        "weight/global_norm": 7.0,
        "amp/scale": 65536.0,
        "health/rejected": 1.0,
        "grad/max_norm": 5.0,
        "grad/min_norm": 3.0,
        "grad/mean_norm": 4.0,
        "grad/has_nan": 1.0,
        "grad/has_inf": 0.0,
    }
    assert layer_metrics(given) == {
        "grad_layer/layer/0/weight/norm": 3.0,
        "grad_layer/layer/0/weight/mean": 0.5,
        "grad_layer/layer/2/weight/norm": 5.0,
        "grad_layer/layer/2/weight/mean": 0.25,
    }


def test_metrics_hold_only_what_was_measured() -> None:
    bare = Sample(
        step=1, layout=LAYOUT, table=np.empty((0, 1), np.float32), scalars={"grad_norm": INF, "clip_coef": 0.1}
    )
    assert metrics(bare) == {"grad/global_norm": INF, "grad/clip_coef": 0.1}
    assert layer_metrics(bare) == {}
    absent = sample(1, value=ABSENT, lr=0.5)
    assert metrics(absent) == {"lr": 0.5}
    norms = metrics(sample(1, value=INF, loss=NAN))
    assert (norms["grad/has_inf"], norms["grad/has_nan"]) == (1.0, 0.0)
    assert metrics(sample(1, value=NAN, loss=1.0))["grad/has_nan"] == 1.0
    assert layer_metrics(sample(1, value=2.0)) == {f"grad_layer/layer/{i}/weight/norm": 2.0 for i in range(3)}


def test_metrics_of_a_validation() -> None:
    given = sample(1, phase="val", val_loss=3.0, **{"val/accuracy": 0.5, "other": 1.0})
    assert metrics(given) == {"val/loss": 3.0, "val/accuracy": 0.5}


# --- CSV


def test_csv_grows_without_losing_anything(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "m.csv"
    sink = CsvSink(path)
    sink.write(sample(0, loss=1.0))
    sink.flush()
    first = path.read_text().splitlines()[0]
    sink.write(sample(1, loss=NAN, **{"lr/0": 0.1}))
    sink.write(sample(1, phase="val", val_loss=2.0, **{"val/acc, top 1": 0.5}))
    sink.write(verdict(1))
    sink.close()
    got = rows(path)
    assert [row["loss"] for row in got] == ["1.0", "nan", ""]
    assert [row["lr/0"] for row in got] == ["", "0.1", ""]
    assert got[2]["val/acc, top 1"] == "0.5"
    assert path.read_text().splitlines()[0].startswith(first)
    assert [p.name for p in path.parent.iterdir()] == ["m.csv"]
    with path.open("a") as file:
        file.write("9,torn")
    again = CsvSink(path)
    again.write(sample(2, loss=3.0, **{"lr/1": 1.0}))
    again.close()
    got = rows(path)
    assert [row["step"] for row in got] == ["0", "1", "1", "9", "2"]
    assert got[-1]["lr/1"] == "1.0"
    assert got[1]["lr/0"] == "0.1"


def test_csv_refuses_a_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("name,age\nx,1\n")
    with pytest.raises(InputError, match="something else"):
        CsvSink(path)
    assert path.read_text() == "name,age\nx,1\n"


def test_csv_keeps_rows_that_the_disk_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = CsvSink(tmp_path / "a.csv")
    sink.write(sample(0, loss=1.0))
    real = Path.open

    class Full:
        """A raw file with room for ten more bytes."""

        def __init__(self, file: Any) -> None:
            self.file, self.room = file, 10

        def write(self, data: memoryview) -> int:
            if not self.room:
                raise OSError("full")
            self.room = 0
            return int(self.file.write(data[:10]))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *a, **k: Full(real(*a, **k)))
        with pytest.raises(OSError, match="full"):
            sink.flush()
    sink.close()
    assert [row["step"] for row in rows(tmp_path / "a.csv")] == ["0"]
    with monkeypatch.context() as patch:
        sink.write(sample(1))
        patch.setattr(os, "getpid", lambda: -1)
        sink.close()
    assert len(rows(tmp_path / "a.csv")) == 1


# --- console


def test_console_prints_incidents_outcomes_and_now_and_then_a_sample() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(stream, every=10)
    for i in range(11):
        sink.write(sample(i, loss=1.5, grad_norm=2.0))
    sink.write(Verdict(step=3, seen_at=4, findings=(finding(3, advice=("lower the lr",)), finding(3, streak=2))))
    sink.write(EVENTS[1])
    sink.write(Outcome(at=4, action=CUT, applied=False))
    sink.write(INFO)
    sink.close()
    assert stream.getvalue().splitlines() == [
        "trimtab: step 0  loss 1.5  grad/global_norm 2",
        "trimtab: step 10  loss 1.5  grad/global_norm 2",
        "trimtab ERROR: step 3: GRAD001 nonfinite-gradient: it broke -> lower the lr",
        "trimtab: step 2: multiply the learning rate by 0.5: done; lr x 0.5",
        "trimtab: step 4: multiply the learning rate by 0.5: not done",
    ]


def test_console_writes_to_stderr_and_above_live_bars(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []

    class Bar:
        _instances: ClassVar[list[int]] = []

        @staticmethod
        def write(line: str, file: Any) -> None:
            said.append((line, file))

    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=Bar))  # type: ignore[arg-type]
    ConsoleSink().write(verdict(1))
    assert "GRAD001" in capsys.readouterr().err
    assert said == []
    Bar._instances.append(1)
    ConsoleSink().write(verdict(2))
    assert len(said) == 1
    assert said[0][1] is sys.stderr


# --- loggers


class Wandb:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int | None]] = []
        self.alerts: list[str] = []

    def log(self, data: dict[str, float], step: int | None = None, commit: bool | None = None) -> None:
        self.calls.append((data, step))

    def alert(self, title: str, text: str) -> None:
        self.alerts.append(title)


class Stepless:
    def __init__(self) -> None:
        self.calls: list[dict[str, float]] = []

    def log(self, data: dict[str, float]) -> None:
        self.calls.append(data)


class Lightning:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))

    def log(self) -> None:
        raise AssertionError("log_metrics is the one to call")


class Board:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []
        self.texts: list[tuple[str, str, int]] = []
        self.flushed = 0

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.scalars.append((tag, value, global_step))

    def add_text(self, tag: str, text: str, global_step: int) -> None:
        self.texts.append((tag, text, global_step))

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        raise AssertionError("the writer is not ours to close")


def bare(step: int, optimizer: str = "", **scalars: float) -> Sample:
    lay = layout(rows=0, optimizer=optimizer)
    return Sample(step=step, layout=lay, table=np.empty((0, 1), np.float32), scalars=scalars)


def test_a_log_with_step_gets_steps_that_never_go_back() -> None:
    run = Wandb()
    sink = adapt(run)
    assert isinstance(sink, MetricSink)
    sink.write(bare(1, loss=1.0))
    sink.write(bare(2, loss=2.0))
    sink.write(verdict(1))
    sink.write(verdict(2, streak=2))
    sink.write(bare(0, optimizer="disc", loss=3.0))
    sink.write(bare(3))
    sink.write(Verdict(step=3, seen_at=4))
    sink.close()
    assert run.calls == [
        ({"trimtab/loss": 1.0}, 1),
        ({"trimtab/loss": 2.0}, 2),
        ({"trimtab/health/GRAD001": 1.0}, 2),
        ({"trimtab/health/GRAD001": 1.0}, 2),
        ({"trimtab/disc/loss": 3.0}, 2),
    ]
    assert run.alerts == ["GRAD001 nonfinite-gradient"]


def test_a_log_without_step_and_one_with_any_keyword() -> None:
    plain = Stepless()
    adapt(plain).write(bare(4, loss=1.0))
    adapt(plain).write(verdict(4))
    assert plain.calls == [
        {"trimtab/loss": 1.0, "trimtab/step": 4},
        {"trimtab/health/GRAD001": 1.0, "trimtab/step": 4},
    ]
    seen: list[Any] = []
    adapt(types.SimpleNamespace(log=lambda data, **more: seen.append((data, more)))).write(bare(4, loss=1.0))
    assert seen == [({"trimtab/loss": 1.0}, {"step": 4})]
    opaque = types.SimpleNamespace(
        log=type("Opaque", (), {"__signature__": 3, "__call__": lambda s, d, step: seen.append(step)})()
    )
    adapt(opaque).write(bare(5, loss=1.0))
    assert seen[-1] == 5


def test_lightning_loggers_keep_the_true_step() -> None:
    logger = Lightning()
    sink = adapt(logger)
    sink.write(bare(2, loss=1.0))
    sink.write(verdict(1))
    assert logger.calls == [({"trimtab/loss": 1.0}, 2), ({"trimtab/health/GRAD001": 1.0}, 1)]


def test_tensorboard() -> None:
    board = Board()
    sink = adapt(board)
    assert isinstance(sink, MetricSink)
    sink.write(bare(2, loss=1.0))
    sink.write(Verdict(step=1, seen_at=2, findings=(finding(1), finding(1, streak=3))))
    sink.write(INFO)
    sink.flush()
    sink.close()
    assert board.scalars == [("trimtab/loss", 1.0, 2), ("trimtab/health/GRAD001", 1.0, 1)]
    assert len(board.texts) == 1
    assert board.flushed >= 2
    minimal = types.SimpleNamespace(add_scalar=lambda *a: None)
    adapt(minimal).write(verdict(1))
    adapt(minimal).close()


def test_a_python_logger_gets_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mine")
    sink = adapt(logging.getLogger("mine"))
    assert isinstance(sink, LoggerSink)
    assert isinstance(adapt(logging.LoggerAdapter(logging.getLogger("mine"), {})), LoggerSink)
    sink.write(bare(1, loss=1.0))
    sink.write(Verdict(step=1, seen_at=2, findings=(finding(1, severity=Severity.WARN), finding(1, streak=2))))
    sink.write(Verdict(step=2, seen_at=3, findings=(finding(2, code="LOSS001"),)))  # graver than what was said
    sink.write(EVENTS[1])
    sink.write(INFO)
    sink.close()
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.DEBUG, logging.WARNING, logging.ERROR, logging.INFO]


def test_a_function() -> None:
    seen: list[dict[str, Any]] = []
    sink = adapt(seen.append)
    assert isinstance(sink, CallSink)
    sink.write(bare(1, loss=1.0))
    sink.write(verdict(1))
    sink.write(INFO)
    sink.close()
    assert seen[0] == {"step": 1, "loss": 1.0}
    assert seen[1]["health/GRAD001"] == 1.0
    assert "it broke" in seen[1]["finding"]


def test_adapt_texts_streams_and_sinks(tmp_path: Path) -> None:
    keep = Keep()
    assert adapt(keep) is keep
    assert isinstance(adapt("console"), ConsoleSink)
    assert isinstance(adapt(f"csv:{tmp_path}/a.csv"), CsvSink)
    assert isinstance(adapt(f"jsonl:{tmp_path}/run"), RunWriter)
    for stream in (sys.stderr, sys.stdout, io.StringIO()):
        assert isinstance(adapt(stream), ConsoleSink)


@pytest.mark.parametrize("thing", [3, None, "nonsense", "csv:", "csv", "console:x", Keep, object()])
def test_adapt_refuses_the_rest_and_says_what_it_takes(thing: Any) -> None:
    with pytest.raises(InputError, match=r"expected a Sink|pass an instance"):
        adapt(thing)
