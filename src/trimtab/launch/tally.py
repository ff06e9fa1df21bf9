"""What is known of one guarded training without holding on to its model: for the last line, and a record cut loose."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.types import Closing, Record, Sample, Verdict

if TYPE_CHECKING:
    from trimtab.record.recorder import Recorder


class Flight:
    """A sink that counts. It completes the record if its guard is collected before it was closed."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.steps: Counter[str] = Counter()
        self.rejected = self.findings = 0
        self.codes: Counter[str] = Counter()
        self.reason = ""
        self.run_dir: Path | None = None
        self.recorder: Recorder | None = None

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

    def close(self) -> None:
        """Nothing to let go of."""

    def ended(self) -> None:
        """The guard is gone: if nobody closed it, its record is completed from what was counted."""
        if self.recorder is None:
            return
        if not self.reason:
            self.recorder.flush()
            self.recorder.put(
                Closing(steps=dict(self.steps), rejected=self.rejected, findings=self.findings, reason="closed")
            )
        self.recorder.close()

    def told(self) -> dict[str, Any]:
        """Plain data for machines."""
        return {
            "model": self.model,
            "steps": dict(self.steps),
            "rejected": self.rejected,
            "findings": dict(self.codes),
            "run_dir": None if self.run_dir is None else str(self.run_dir),
        }
