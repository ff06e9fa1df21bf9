"""Writes a record: the one sink that every run has."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path

from trimtab.core.errors import RecordError
from trimtab.core.types import BrainState, Closing, Decision, Layout, Outcome, Record, RunInfo, Sample, Verdict
from trimtab.record import decode, tables
from trimtab.record.format import (
    FIRST_BYTES,
    LINES_NAME,
    TABLES_NAME,
    event_line,
    layout_line,
    run_line,
    sample_line,
)
from trimtab.record.thin import TEMPORARY, thin

log = logging.getLogger("trimtab.record")

_BATCH_BYTES = 1 << 20  # a batch this large is written without waiting for `flush`
_MAX_PENDING_BYTES = 1 << 24  # while the disk refuses, samples beyond this are given up
_SEQ = re.compile(rb'\{"t":"[a-z]+","seq":(\d+)')


class _Appender:
    """An append-only file and the bytes not yet in it.

    It is opened for each batch and never buffered: a fork has nothing to write twice, and a directory that vanished
    is noticed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = path.stat().st_size if path.exists() else 0
        self.pending: list[tuple[bool, bytes]] = []  # may it be given up, data
        self.num_bytes = 0

    def add(self, data: bytes, *, expendable: bool) -> None:
        self.pending.append((expendable, data))
        self.num_bytes += len(data)

    def give_up_samples(self) -> None:
        self.pending = [item for item in self.pending if not item[0]]
        self.num_bytes = sum(len(data) for _, data in self.pending)

    def flush(self) -> None:
        if not self.pending:
            return
        create = os.O_CREAT if self.size == 0 else 0
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | create | getattr(os, "O_BINARY", 0), 0o666)
        try:
            self.size = os.fstat(fd).st_size
            rest = memoryview(b"".join(data for _, data in self.pending))
            total = len(rest)
            try:
                while rest:
                    rest = rest[os.write(fd, rest) :]
            except OSError:
                with contextlib.suppress(OSError):  # half a batch would glue itself to the next one
                    os.ftruncate(fd, self.size)
                raise
        finally:
            os.close(fd)
        self.size += total
        self.pending, self.num_bytes = [], 0


class RunWriter:
    """Appends every record of a run to `folder`, and keeps the two files below `max_bytes` together.

    A folder that already holds a record is continued. `write` collects, `flush` writes; both raise OSError when the
    disk does, keep what could not be written, and can be called again.

    Example:
        >>> import tempfile
        >>> from trimtab.core.types import Closing
        >>> from trimtab.record.reader import read_run
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     writer = RunWriter(Path(folder))
        ...     writer.write(Closing(steps={"": 3}, rejected=0, findings=0, reason="done"))
        ...     writer.close()
        ...     read_run(folder).closing.reason
        'done'
    """

    def __init__(self, folder: Path | str, *, max_bytes: int = 1_000_000_000) -> None:
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self._pid = os.getpid()
        self._seq = 0
        self._ids: dict[Layout, int] = {}
        self._seen: dict[int, tuple[Layout, int]] = {}  # by identity: hashing hundreds of names per step is not free
        self._thin_at: float = max_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        self._continue()
        self._lines = _Appender(self.folder / LINES_NAME)
        self._tables = _Appender(self.folder / TABLES_NAME)
        self._opened = self._lines.size > 0

    def write(self, record: Record) -> None:
        """Take one record; verdicts without findings are not kept."""
        if os.getpid() != self._pid or (isinstance(record, Verdict) and not record.findings):
            return
        if isinstance(record, RunInfo):
            self._add(run_line(record, self._take_seq()))
            self._opened = True
            return
        if not self._opened:  # every record starts with its format
            self._add(run_line(None, self._take_seq()))
            self._opened = True
        if isinstance(record, Sample):
            self._add_sample(record)
        elif isinstance(record, Layout):
            self._layout_id(record)
        elif isinstance(record, (Verdict, Decision, Outcome, BrainState, Closing)):
            self._add(event_line(record, self._take_seq()))
        else:
            raise TypeError(f"{type(record).__name__} is not a record")
        if self._lines.num_bytes + self._tables.num_bytes > _BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything collected to the operating system."""
        if os.getpid() != self._pid:
            return
        try:
            self._tables.flush()  # first: a line promises its table
            self._lines.flush()
        except OSError:
            if self._lines.num_bytes + self._tables.num_bytes > _MAX_PENDING_BYTES:
                self._lines.give_up_samples()
                self._tables.give_up_samples()
            raise
        total = self._lines.size + self._tables.size
        if total > self._thin_at:
            self._thin_at = 1.25 * total  # also when it fails: a pass reads everything, so not at every flush
            thin(self._lines.path, self._tables.path, goal=int(0.75 * self.max_bytes), seq=self._take_seq())
            self._lines, self._tables = _Appender(self._lines.path), _Appender(self._tables.path)
            self._thin_at = max(self.max_bytes, 1.25 * (self._lines.size + self._tables.size))

    def close(self) -> None:
        """Flush; nothing is held open."""
        self.flush()

    def _take_seq(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _add(self, line: bytes, *, expendable: bool = False) -> None:
        self._lines.add(line, expendable=expendable)

    def _layout_id(self, layout: Layout) -> int:
        known = self._seen.get(id(layout))
        if known is not None:
            return known[1]
        number = self._ids.get(layout)
        if number is None:
            seq = self._take_seq()
            self._add(layout_line(layout, seq))
            number = self._ids[layout] = seq
        if len(self._seen) >= 64:  # layouts made anew for each sample must not pile up
            self._seen.clear()
        self._seen[id(layout)] = (layout, number)
        return number

    def _add_sample(self, sample: Sample) -> None:
        layout = self._layout_id(sample.layout)
        line = sample_line(sample, self._seq, layout)
        if sample.table.size:
            self._tables.add(tables.encode_table(sample, layout, self._seq), expendable=True)
        self._add(line, expendable=True)
        self._seq += 1

    def _continue(self) -> None:
        """Cut off what a crash tore, and learn which numbers and layouts the record already uses."""
        for name in (LINES_NAME, TABLES_NAME):
            (self.folder / (name + TEMPORARY)).unlink(missing_ok=True)
        path = self.folder / LINES_NAME
        if path.exists() and path.stat().st_size:
            self._continue_lines(path)
        path = self.folder / TABLES_NAME
        if path.exists():
            entries, problems, end = tables.scan(tables.map_file(path))
            if problems and end < path.stat().st_size:
                log.warning("%s: %s; cut off, the record goes on", path, problems[-1])
                os.truncate(path, end)
            self._seq = max([self._seq, *(entry.seq + 1 for entry in entries)])

    def _continue_lines(self, path: Path) -> None:
        ours, whole, first, raw = False, 0, b"", b""
        with path.open("rb") as file:
            for raw in file:
                first = first or raw
                found = _SEQ.match(raw)
                ours = ours or found is not None or FIRST_BYTES.startswith(raw)
                if not raw.endswith(b"\n"):
                    break
                whole += len(raw)
                if found is not None:
                    self._seq = max(self._seq, int(found[1]) + 1)
                self._learn(raw, path)
        if not ours:
            raise RecordError(
                f"{path} is not a record of trimtab (it begins with {first[:40]!r}): nothing was written; "
                "choose another run_dir, or move that file away"
            )
        if raw.endswith(b"\n"):
            return
        try:
            self._seq = max(self._seq, decode.parse_line(raw)["seq"] + 1)
            self._learn(raw, path)
            with path.open("ab") as file:  # only its line end is missing
                file.write(b"\n")
        except ValueError:
            log.warning("%s: its last line was torn (%d bytes); cut off, the record goes on", path, len(raw))
            os.truncate(path, whole)

    def _learn(self, raw: bytes, path: Path) -> None:
        with contextlib.suppress(*decode.DAMAGE):
            if raw.startswith(b'{"t":"layout"'):
                data = decode.parse_line(raw)
                self._ids.setdefault(decode.to_layout(data), data["seq"])
            elif raw.startswith(FIRST_BYTES):
                decode.check_version(decode.parse_line(raw), path)
