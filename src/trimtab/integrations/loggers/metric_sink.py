"""What a guard records, as metrics and texts for an experiment logger: one sink for all, one target for each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from trimtab.core.journal import IncidentLines
from trimtab.core.types import Outcome, Record, Sample, Severity, Verdict
from trimtab.integrations.loggers.histogram import Histogram, Histograms
from trimtab.record.reader import is_complete, read_run
from trimtab.record.sinks import named_metrics

log = logging.getLogger("trimtab.record")

NAMESPACE = "trimtab/"
"""Before every name, so that nothing is mixed up with what you log yourself."""
STEP = f"{NAMESPACE}step"
WAIT_FOR_RECORD_S = 2.0
MOST_REPORTED_BYTES = 200 << 20
"""A longer record takes too long to draw at the end of a run: `trimtab report --html` does it at leisure."""


class Target(Protocol):
    """One experiment logger: how numbers, texts, histograms and a page get into its run."""

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers of one step."""

    def tell(self, title: str, text: str, severity: Severity | None, step: int) -> None:
        """Say something about a step: a finding, or (no severity) what was done about one."""

    def histograms(self, found: Mapping[str, Histogram], step: int) -> None:
        """Log histograms of one step."""

    def page(self, path: Path) -> None:
        """Keep a file with the run."""

    def flush(self) -> None:
        """Send what was collected."""

    def close(self) -> None:
        """Let go of what is ours: a run that was begun here ends, the user's own does not."""


class MetricSink:
    """Sends samples, findings and outcomes to a target, under `trimtab/...`.

    `step_of` turns a step of the guard into one of your framework's, where that counts otherwise. When the guard is
    closed, the report is made of its record and kept with the run.
    """

    patience_s = 10.0
    """How long a guard that is closed waits for the report to be made and handed over."""

    def __init__(self, target: Target, *, step_of: Callable[[int], int] | None = None) -> None:
        self._target = target
        self._step_of = step_of if step_of is not None else _same
        self._lines = IncidentLines()
        self._folder: Path | None = None

    @property
    def num_lost(self) -> int:
        """How many rows the target had to give up."""
        return int(getattr(self._target, "num_lost", 0))

    def recorded_to(self, folder: Path) -> None:
        """The guard records to this folder: the report is made of what is there."""
        self._folder = folder

    def write(self, record: Record | Histograms) -> None:
        """Forward what a person wants to see beside the own metrics."""
        if isinstance(record, Sample):
            values = {NAMESPACE + name: value for name, value in named_metrics(record).items()}
            if values:
                self._target.scalars(values, self._step_of(record.step))
        elif isinstance(record, Verdict) and record.findings:
            step = self._step_of(record.step)
            self._target.scalars({f"{NAMESPACE}health/{finding.code}": 1.0 for finding in record.findings}, step)
            line = self._lines.of(record)
            if line is not None:
                self._target.tell(f"{line.finding.code} {line.finding.name}", str(line), line.severity, step)
        elif isinstance(record, Outcome):
            text = self._lines.outcome(record)
            if text is not None:
                self._target.tell(f"action {record.action.kind}", text, None, self._step_of(record.at))
        elif isinstance(record, Histograms):
            found = {NAMESPACE + name: one for name, one in record.named().items()}
            self._target.histograms(found, self._step_of(record.step))

    def flush(self) -> None:
        """Send what was collected."""
        self._target.flush()

    def close(self) -> None:
        """Send the rest and the report."""
        self._lines.close()
        try:
            self._target.flush()
        finally:
            try:
                self._send_report()
            finally:
                self._target.close()

    def _send_report(self) -> None:
        """A report that cannot be made costs a line in the log: it can be made of the record at any time."""
        folder = self._folder
        if folder is None:
            return
        try:
            if _size(folder) > MOST_REPORTED_BYTES or not _completed(folder):
                log.warning("no report of %s was logged; make it with `trimtab report --html`", folder)
                return
            from trimtab.report.html import write_html

            self._target.page(write_html(read_run(folder)))
        except Exception as error:
            log.warning("the report of %s could not be logged (%s: %s)", folder, type(error).__name__, error)


def _completed(folder: Path) -> bool:
    """Wait for the record, which another thread completes just now."""
    deadline = time.monotonic() + WAIT_FOR_RECORD_S
    while not is_complete(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def _same(step: int) -> int:
    return step
