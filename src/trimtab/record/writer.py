"""Writes a record: the one sink that every run has.

A record comes into being together with its first line, and is appended to from then on. Whatever the disk does, the
training goes on: what cannot be written is kept, up to a bound, and written when the disk takes it again. What had to
be given up is counted, and a line says so.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
import weakref
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from trimtab.core.errors import RecordError
from trimtab.core.types import BrainState, Closing, Decision, Layout, Outcome, Record, RunInfo, Sample, Verdict
from trimtab.record import format as decode
from trimtab.record.format import (
    FIRST_BYTES,
    LINES_NAME,
    TABLES_NAME,
    Lost,
    encode_table,
    event_line,
    layout_line,
    lost_line,
    map_tables,
    run_line,
    sample_line,
    scan_tables,
)
from trimtab.record.thin import TEMPORARY, thin

log = logging.getLogger("trimtab.record")

NEW = ".new"
"""How the name of a folder or file ends that is not complete yet. Of a folder it also begins with a dot."""
_STALE_S = 3600.0
_BATCH_BYTES = 1 << 20  # a batch this large is written without waiting for `flush`
_MAX_PENDING_BYTES = 1 << 24  # while the disk refuses, the oldest and least important lines beyond this are given up
_SEQ = re.compile(rb'\{"t":"[a-z]+","seq":(\d+)')
_KEEP, _EVENT, _EXPENDABLE = range(3)
"""What may be given up while the disk refuses, the last of these first."""


class _Item(NamedTuple):
    """A line or a table that is not on disk yet."""

    data: bytes
    seq: int
    rank: int = _KEEP
    step: int | None = None  # of a sample


class _Appender:
    """An append-only file and the items not yet in it.

    It is opened for each batch and never buffered: a fork has nothing to write twice, and a directory that vanished
    is noticed. `size` is how much of the file is known to be good. Whatever lies behind it was left by a write that
    failed, and is cut off before the next one: nothing is torn, and nothing is there twice.
    """

    def __init__(self, path: Path, *, lines: bool) -> None:
        self.path = path
        self.size = path.stat().st_size if path.exists() else 0
        self.pending: list[_Item] = []
        self.num_bytes = 0
        self._lines = lines

    def add(self, item: _Item) -> None:
        self.pending.append(item)
        self.num_bytes += len(item.data)

    def drop(self, seqs: Collection[int]) -> list[_Item]:
        """Give up the items with these numbers; returns them."""
        gone = [item for item in self.pending if item.seq in seqs]
        self.pending = [item for item in self.pending if item.seq not in seqs]
        self.num_bytes = sum(len(item.data) for item in self.pending)
        return gone

    def flush(self) -> None:
        if not self.pending:
            return
        fd = self._open()
        try:
            data = self._end_of_good(fd) + b"".join(item.data for item in self.pending)
            try:
                _write_all(fd, data)
            except OSError:
                with contextlib.suppress(OSError):  # else the next flush does it
                    os.ftruncate(fd, self.size)
                raise
        finally:
            os.close(fd)
        self.size += len(data)
        self.pending, self.num_bytes = [], 0

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0)
        if self.size == 0:
            return os.open(self.path, flags | os.O_CREAT, 0o666)
        try:
            return os.open(self.path, flags)
        except FileNotFoundError:
            if self._lines:  # of no use without those before them
                raise
        # It may only have been out of sight: nothing that was written before must be taken for leftovers.
        fd = os.open(self.path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        self.size = 0
        return fd

    def _end_of_good(self, fd: int) -> bytes:
        """Make the file end where it is known to be good; returns what has to come first then."""
        found = os.fstat(fd).st_size
        if found > self.size:
            os.ftruncate(fd, self.size)
        if found >= self.size:
            return b""
        log.warning("%s was cut from %d to %d bytes by somebody else", self.path, self.size, found)
        self.size = found
        torn = self._lines and found > 0 and os.pread(fd, 1, found - 1) != b"\n"
        return b"\n" if torn else b""


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        num = os.write(fd, rest)
        if num == 0:
            raise OSError(f"a write of {len(rest)} bytes wrote none")
        rest = rest[num:]


class _Loss:
    """What could not be kept while the disk refused."""

    def __init__(self, why: str) -> None:
        self.why = why
        self.samples = self.others = 0
        self.first: int | None = None
        self.last: int | None = None

    def add(self, items: Collection[_Item]) -> None:
        steps = [item.step for item in items if item.step is not None]
        self.samples += len(steps)
        self.others += len(items) - len(steps)
        self.span(steps)

    def span(self, steps: Collection[int]) -> None:
        known = [step for step in (self.first, self.last, *steps) if step is not None]
        if known:
            self.first, self.last = min(known), max(known)

    def total(self) -> Lost:
        return Lost(samples=self.samples, others=self.others, first=self.first, last=self.last, why=self.why)


class _Tally:
    """What a closing line says, counted here for the case that nobody writes one."""

    def __init__(self) -> None:
        self.closed = False
        self._steps: Counter[str] = Counter()
        self._rejected = self._findings = 0

    def add(self, record: Record) -> None:
        if isinstance(record, Sample) and record.phase == "train":
            self._steps[record.optimizer] += 1
            self._rejected += record.scalars.get("rejected", 0.0) > 0
        elif isinstance(record, Verdict):
            self._findings += sum(finding.streak <= 1 for finding in record.findings)
        elif isinstance(record, Closing):
            self.closed = True

    def closing(self, reason: str) -> Closing:
        steps = dict(self._steps)
        return Closing(steps=steps, rejected=self._rejected, findings=self._findings, reason=reason)


class RunWriter:
    """Appends every record of a run to `folder`, and keeps the two files below `max_bytes` together.

    A folder that already holds a record is continued; a new one appears with its first line in it. `write` collects,
    `flush` writes; both raise OSError when the disk does, keep what could not be written, and can be called again. A
    folder that was deleted meanwhile is made again.

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
        self._home = Path(os.path.abspath(folder))  # a program may change its working directory
        self._pid = os.getpid()
        self._seq = 0
        self._ids: dict[Layout, int] = {}
        self._seen: dict[int, tuple[Layout, int]] = {}  # by identity: hashing hundreds of names per step is not free
        self._thin_at: float = max_bytes
        self._run_line = b""
        self._opening: RunInfo | None = None
        self._continue()
        self._lines = _Appender(self._home / LINES_NAME, lines=True)
        self._tables = _Appender(self._home / TABLES_NAME, lines=False)
        self._begun = self._opened = self._lines.size > 0
        self._refusing = False
        self._loss: _Loss | None = None
        self._written = _Loss("its folder was deleted")  # what would go with it
        self._tally, self._reason = _Tally(), "closed"

    def open(self, info: RunInfo) -> None:
        """Bring the record into being, with this as its first line. OSError: it is tried again with each flush."""
        self.write(info)
        self._opening = info
        _OPEN.add(self)
        self.flush()

    def write(self, record: Record) -> None:
        """Take one record; verdicts without findings are not kept."""
        if os.getpid() != self._pid or (isinstance(record, Verdict) and not record.findings):
            return
        self._tally.add(record)
        if isinstance(record, RunInfo):
            if record is not self._opening:
                self._add_run_line(record)
            return
        if not self._opened:  # every record starts with its format
            self._add_run_line(None)
        if isinstance(record, Sample):
            self._add_sample(record)
        elif isinstance(record, Layout):
            self._layout_id(record)
        elif isinstance(record, (Verdict, Decision, Outcome, BrainState, Closing)):
            seq = self._take_seq()
            self._lines.add(_Item(event_line(record, seq), seq, _rank(record)))
        else:
            raise TypeError(f"{type(record).__name__} is not a record")
        if self._num_pending > _MAX_PENDING_BYTES:
            self._give_up()
        elif self._num_pending > _BATCH_BYTES and not self._refusing:
            self.flush()

    def flush(self) -> None:
        """Hand everything collected to the operating system."""
        if os.getpid() != self._pid or not (self._begun or self._lines.pending):
            return
        try:
            if not self._begun:
                self._begin()
            elif self._is_gone():
                self._begin_again()
            samples = [item.step for item in self._lines.pending if item.step is not None]
            self._tables.flush()  # first: a line promises its table
            self._lines.flush()
            self._written.samples += len(samples)
            self._written.span(samples)
            self._record_losses()
        except OSError:
            self._refusing = True
            raise
        self._refusing = False
        if self._lines.size + self._tables.size > self._thin_at:
            self._thin()

    def end(self, reason: str) -> None:
        """Why the run ends, for a record that nobody closed."""
        self._reason = reason

    def close(self) -> None:
        """Flush; nothing is held open. A record that was opened with `open` is complete then."""
        if self._opening is not None and not self._tally.closed and os.getpid() == self._pid:
            self.write(self._tally.closing(self._reason))
        _OPEN.discard(self)
        self.flush()

    # -- beginning, and beginning again --------------------------------------------------------------------------

    def _begin(self) -> None:
        """The folder and the first line come together: a process that is killed leaves both or nothing."""
        first = self._lines.pending[0]
        try:
            _create(self._home, first.data)
        except FileExistsError:
            if self._lines.path.read_bytes() != first.data:  # else it was us, and Ctrl-C came right after
                raise
        self._lines.drop({first.seq})
        self._lines.size = len(first.data)
        self._begun = True

    def _is_gone(self) -> bool:
        try:
            return os.stat(self._lines.path).st_size == 0
        except (FileNotFoundError, NotADirectoryError):
            return True

    def _begin_again(self) -> None:
        """Somebody deleted the record: make it again, with all that what follows refers to."""
        known = sorted((seq, layout) for layout, seq in self._ids.items() if self._on_disk(seq))
        head = self._run_line + b"".join(layout_line(layout, seq) for seq, layout in known)
        _create(self._home, head)
        self._lines.size = len(head)
        loss = self._loss = self._loss or _Loss(self._written.why)
        loss.why = self._written.why
        loss.samples += self._written.samples
        loss.span([step for step in (self._written.first, self._written.last) if step is not None])
        self._written = _Loss(self._written.why)

    def _on_disk(self, seq: int) -> bool:
        return not any(item.seq == seq for item in self._lines.pending)

    # -- what cannot be kept -------------------------------------------------------------------------------------

    @property
    def _num_pending(self) -> int:
        return self._lines.num_bytes + self._tables.num_bytes

    def _give_up(self) -> None:
        """Let go of the oldest and least important half of what is waiting."""
        loss = self._loss = self._loss or _Loss("the disk refused to take them")
        for rank in (_EXPENDABLE, _EVENT):
            excess = self._num_pending - _MAX_PENDING_BYTES // 2
            sizes: dict[int, int] = {}
            for item in (*self._lines.pending, *self._tables.pending):
                if item.rank == rank:
                    sizes[item.seq] = sizes.get(item.seq, 0) + len(item.data)
            oldest: set[int] = set()
            for seq in sorted(sizes):
                if excess <= 0:
                    break
                excess -= sizes[seq]
                oldest.add(seq)
            loss.add(self._lines.drop(oldest))
            self._tables.drop(oldest)

    def _record_losses(self) -> None:
        if self._loss is None:
            return
        lost, self._loss = self._loss.total(), None
        log.warning("%s: %s", self.folder, lost)
        seq = self._take_seq()
        self._lines.add(_Item(lost_line(lost, seq), seq))
        self._lines.flush()

    def _thin(self) -> None:
        total = self._lines.size + self._tables.size
        self._thin_at = 1.25 * total  # also when it fails: a pass reads everything, so not at every flush
        try:
            thin(self._lines.path, self._tables.path, goal=int(0.75 * self.max_bytes), seq=self._take_seq())
        finally:  # one of the two may have been replaced even so
            self._lines = _Appender(self._lines.path, lines=True)
            self._tables = _Appender(self._tables.path, lines=False)
        self._thin_at = max(self.max_bytes, 1.25 * (self._lines.size + self._tables.size))

    # -- lines ---------------------------------------------------------------------------------------------------

    def _take_seq(self) -> int:
        self._seq += 1
        return self._seq - 1

    def _add_run_line(self, info: RunInfo | None) -> None:
        seq = self._take_seq()
        line = run_line(info, seq)
        self._run_line = self._run_line or line
        self._lines.add(_Item(line, seq))
        self._opened = True

    def _layout_id(self, layout: Layout) -> int:
        known = self._seen.get(id(layout))
        if known is not None:
            return known[1]
        number = self._ids.get(layout)
        if number is None:
            seq = self._take_seq()
            self._lines.add(_Item(layout_line(layout, seq), seq))
            number = self._ids[layout] = seq
        if len(self._seen) >= 64:  # layouts built for each sample must not pile up
            self._seen.clear()
        self._seen[id(layout)] = (layout, number)
        return number

    def _add_sample(self, sample: Sample) -> None:
        layout = self._layout_id(sample.layout)
        line = sample_line(sample, self._seq, layout)
        if sample.table.size:
            self._tables.add(_Item(encode_table(sample, layout, self._seq), self._seq, _EXPENDABLE))
        self._lines.add(_Item(line, self._seq, _EXPENDABLE, sample.step))
        self._seq += 1

    def _continue(self) -> None:
        """Cut off what a crash tore, and learn which numbers and layouts the record already uses."""
        for name in (LINES_NAME + TEMPORARY, TABLES_NAME + TEMPORARY, LINES_NAME + NEW):
            with contextlib.suppress(OSError):
                (self._home / name).unlink(missing_ok=True)
        path = self._home / LINES_NAME
        if path.exists() and path.stat().st_size:
            self._continue_lines(path)
        path = self._home / TABLES_NAME
        if path.exists():
            entries, problems, end = scan_tables(map_tables(path))
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
            self._seq = max(self._seq, decode.seq_of(decode.parse_line(raw)) + 1)
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
                self._ids.setdefault(decode.to_layout(data), decode.seq_of(data))
            elif raw.startswith(FIRST_BYTES):
                decode.check_version(decode.parse_line(raw), path)
                self._run_line = self._run_line or raw


_OPEN: weakref.WeakSet[RunWriter] = weakref.WeakSet()


def complete_all(reason: str, but: Collection[object]) -> None:
    """Complete every record of this process that was begun and is not closed, but for these."""
    for writer in list(_OPEN):
        if not any(writer is other for other in but):
            writer.end(reason)
            with contextlib.suppress(OSError):
                writer.close()


def _rank(record: Record) -> int:
    if isinstance(record, Closing):
        return _KEEP
    lasting = isinstance(record, Verdict) and all(finding.streak > 1 for finding in record.findings)
    return _EXPENDABLE if lasting or isinstance(record, BrainState) else _EVENT


def _create(folder: Path, head: bytes) -> None:
    """Make the folder and, in it, the file of lines with these in it: whoever looks sees both or neither.

    FileExistsError: another process was faster.
    """
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        _clear_away(folder.parent)
        temporary = folder.with_name(f".{folder.name}.{os.getpid()}{NEW}")
        try:
            temporary.mkdir(exist_ok=True)
            _write_file(temporary / LINES_NAME, head)
            os.rename(temporary, folder)
            return
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            if not folder.is_dir():
                raise
    path, new = folder / LINES_NAME, folder / (LINES_NAME + NEW)
    try:
        _write_file(new, head)
        if path.exists() and path.stat().st_size == 0:
            os.replace(new, path)
            return
        try:
            os.link(new, path)  # unlike a replacement, this refuses where there is one already
        except FileExistsError:
            raise
        except OSError:  # not every disk knows links
            os.replace(new, path)
    finally:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)


def _write_file(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o666)
    try:
        _write_all(fd, data)
    finally:
        os.close(fd)


def _clear_away(parent: Path) -> None:
    """Remove what a process left behind that was killed in the very moment it began a record."""
    with contextlib.suppress(OSError):
        for left in parent.glob(f".*{NEW}"):
            if time.time() - left.stat().st_mtime > _STALE_S:
                shutil.rmtree(left, ignore_errors=True)
