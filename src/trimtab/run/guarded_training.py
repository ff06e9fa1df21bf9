"""The counts of one guarded training, without a reference to its model: for the summary and an unclosed record."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from trimtab.core.types import Closing, Record, Sample, Verdict

if TYPE_CHECKING:
    from trimtab.record.recorder import Recorder


class Summary(TypedDict):
    """A training as plain data: for `--json`, and for other processes."""

    model: str
    steps: dict[str, int]
    rejected: int
    findings: dict[str, int]
    run_dir: str | None
    pid: int
    ended: str
    own: bool


class GuardedTraining:
    """A sink that counts. It completes the record if its guard is collected before it was closed.

    `own` is a guard that the program built itself; `pid` is that of the process it trained in.
    """

    def __init__(self, model: str, *, own: bool = False) -> None:
        self.model, self.own = model, own
        self.steps: Counter[str] = Counter()
        self.rejected = self.findings = 0
        self.codes: Counter[str] = Counter()
        self.reason = ""
        self.run_dir: Path | None = None
        self.recorder: Recorder | None = None
        self.pid = os.getpid()

    def write(self, record: Record) -> None:
        """Count samples and findings."""
        if isinstance(record, Sample) and record.phase == "train":
            self.steps[record.optimizer] += 1
            self.rejected += record.scalars.get("rejected", 0.0) > 0
        elif isinstance(record, Verdict):
            new = [f for f in record.findings if f.streak <= 1]
            self.findings += len(new)
            self.codes.update(f"{f.code} {f.name}" for f in new)
        elif isinstance(record, Closing):
            self.reason = record.reason

    def end(self, reason: str) -> None:
        """Note why it ends, if nobody closed it."""
        self.reason = self.reason or reason

    def close(self) -> None:
        """Do nothing: a sink without resources."""

    def ended(self) -> None:
        """The guard is gone: if nobody closed it, complete its record from what was counted. Does not wait."""
        if self.recorder is not None:
            self.recorder.finish()

    def summary(self) -> Summary:
        """The counts as plain data."""
        return {
            "model": self.model,
            "steps": dict(self.steps),
            "rejected": self.rejected,
            "findings": dict(self.codes),
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "pid": self.pid,
            "ended": self.reason,
            "own": self.own,
        }

    @classmethod
    def from_summary(cls, data: Summary) -> GuardedTraining:
        """The training that a summary of another process describes."""
        training = cls(str(data["model"]), own=bool(data["own"]))
        training.steps, training.codes = Counter(data["steps"]), Counter(data["findings"])
        training.rejected, training.findings = int(data["rejected"]), sum(training.codes.values())
        training.run_dir = None if data["run_dir"] is None else Path(data["run_dir"])
        training.pid, training.reason = int(data["pid"]), str(data["ended"])
        return training
