"""Records and sinks that the tests of `trimtab.record` share."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from trimtab.core.types import (
    FULL_COLUMNS,
    NORM_COLUMNS,
    Action,
    BrainState,
    Closing,
    Decision,
    Finding,
    Kind,
    Layout,
    Outcome,
    Record,
    RunInfo,
    Sample,
    Severity,
    Verdict,
)

NAN, INF = float("nan"), float("inf")


def layout(rows: int = 3, columns: Any = NORM_COLUMNS, optimizer: str = "") -> Layout:
    return Layout(
        names=tuple(f"layer.{i}.weight" for i in range(rows)),
        kinds=(Kind.GRAD,) * rows,
        numel=(4,) * rows,
        columns=columns,
        optimizer=optimizer,
    )


LAYOUT = layout()
FULL = layout(columns=FULL_COLUMNS)


def sample(step: int, *, value: float = 1.0, lay: Layout = LAYOUT, phase: str = "train", **scalars: float) -> Sample:
    table = np.full((len(lay.names), len(lay.columns)), value, np.float32)
    return Sample(step=step, layout=lay, table=table, phase=phase, scalars=scalars or {"loss": 1.0, "grad_norm": 1.0})


def finding(step: int, streak: int = 1, **more: Any) -> Finding:
    given = {"code": "GRAD001", "name": "nonfinite-gradient", "severity": Severity.ERROR, "message": "it broke"}
    return Finding(step=step, streak=streak, **{**given, **more})


def verdict(step: int, streak: int = 1, optimizer: str = "") -> Verdict:
    return Verdict(step=step, seen_at=step + 1, findings=(finding(step, streak),), optimizer=optimizer)


INFO = RunInfo(
    run_id="r1",
    started="2026-01-02T03:04:05+00:00",
    config={"clip": 1.0, "deep": [1, {"x": INF}]},
    versions={"torch": "2.6"},
    model="Net",
    num_parameters=12,
    optimizers=("AdamW",),
    rules=("GRAD001",),
)
CUT = Action(kind="cut_lr", args={"factor": 0.5})
EVENTS: list[Record] = [
    Decision(about=1, at=2, actions=(CUT,), because=("GRAD001",)),
    Outcome(at=2, action=CUT, applied=True, detail="lr x 0.5"),
    BrainState(step=3, state={"window": [1.0, NAN, -INF], "n": 3, "none": None}),
]
CLOSING = Closing(steps={"": 5}, rejected=1, findings=1, reason="done", dropped={"x": 2})


def small_run() -> list[Record]:
    records: list[Record] = [INFO]
    records += [sample(i, value=i, loss=1.5 * i, grad_norm=NAN if i == 2 else 2.0) for i in range(4)]
    return [*records, verdict(2), *EVENTS, sample(4, lay=FULL, loss=-INF), CLOSING]


def same(a: Sample, b: Sample) -> bool:
    """Equal to the last bit, NaN included."""
    return (
        (a.step, a.branch, a.layout, a.phase) == (b.step, b.branch, b.layout, b.phase)
        and list(a.scalars) == list(b.scalars)
        and all(repr(float(a.scalars[k])) == repr(float(b.scalars[k])) for k in a.scalars)
        and a.table.shape == b.table.shape
        and a.table.tobytes() == b.table.tobytes()
    )


class Keep:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.closed = 0
        self.flushed = 0

    def write(self, record: Record) -> None:
        self.records.append(record)

    def flush(self) -> None:
        self.flushed += 1

    def close(self) -> None:
        self.closed += 1


class Blocked(Keep):
    """A sink that hangs in its first write until `gate` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.inside = threading.Event()

    def write(self, record: Record) -> None:
        self.inside.set()
        self.gate.wait()
        super().write(record)
