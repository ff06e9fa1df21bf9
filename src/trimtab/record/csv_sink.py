"""One CSV row per sample, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import io
import logging
import os
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.core.types import Record, Sample
from trimtab.record.metrics import STANDARD, metrics

log = logging.getLogger("trimtab.record")

MAX_ROWS = 100_000
"""Rows kept while they cannot be written; beyond this the oldest go."""
_KEYS = ("step", "branch", "optimizer", "phase")


class CsvSink:
    """Appends one row per sample to `path`.

    The standard columns are there from the start. When a new one turns up (a learning-rate group, a validation
    metric) the file is rewritten under a temporary name with the longer header and then replaced, so no row is ever
    lost. An existing file of ours is continued.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._columns = [*_KEYS, *STANDARD]
        self._rows: list[dict[str, object]] = []
        self._num_lost = 0
        self._pid = os.getpid()
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open(newline="", encoding="utf-8", errors="replace") as file:
                header = next(csv.reader(file), [])
            if header[: len(_KEYS)] != list(_KEYS):
                raise InputError(
                    f"{self.path} is a file of something else (its first row is {header[:4]}): nothing was written; "
                    f"expected columns that begin with {', '.join(_KEYS)}, so choose another path"
                )
            self._columns = header
            self._end_line()
        else:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append([self._columns])

    def write(self, record: Record) -> None:
        """Collect a row; records other than samples have no place in a table of numbers."""
        if isinstance(record, Sample):
            key = {"step": record.step, "branch": record.branch, "optimizer": record.optimizer, "phase": record.phase}
            self._rows.append({**key, **metrics(record)})
            if len(self._rows) > MAX_ROWS:
                del self._rows[0]
                self._num_lost += 1

    def flush(self) -> None:
        """Write the collected rows."""
        if not self._rows or os.getpid() != self._pid:
            return
        new = dict.fromkeys(name for row in self._rows for name in row if name not in self._columns)
        if new:
            self._grow([*self._columns, *new])
        rows: list[list[object]] = [[row.get(name, "") for name in self._columns] for row in self._rows]
        if not self.path.exists():  # somebody deleted it: rows without a header would be of no use
            self.path.parent.mkdir(parents=True, exist_ok=True)
            rows.insert(0, [*self._columns])
        self._append(rows)
        self._rows.clear()
        if self._num_lost:
            log.warning("%s: %d rows are lost: the disk refused to take them", self.path, self._num_lost)
            self._num_lost = 0

    def close(self) -> None:
        """Flush; nothing is held open."""
        self.flush()

    def _append(self, rows: list[list[object]] | list[list[str]]) -> None:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        with self.path.open("ab", buffering=0) as file:
            before = os.fstat(file.fileno()).st_size
            rest = memoryview(text.getvalue().encode())
            try:
                while rest:
                    rest = rest[file.write(rest) or 0 :]
            except OSError:
                file.truncate(before)  # the rows are still ours and come again: not twice
                raise

    def _grow(self, columns: list[str]) -> None:
        temporary = self.path.with_name(self.path.name + ".growing")
        with (
            self.path.open(newline="", encoding="utf-8") as old,
            temporary.open("w", newline="", encoding="utf-8") as new,
        ):
            reader, writer = csv.reader(old), csv.writer(new, lineterminator="\n")
            next(reader, None)
            writer.writerow(columns)
            writer.writerows(row + [""] * (len(columns) - len(row)) for row in reader)
        os.replace(temporary, self.path)
        self._columns = columns

    def _end_line(self) -> None:
        """A crash may have torn the last row: the next one must not be glued to it."""
        with self.path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) not in (b"\n", b"\r"):
                file.write(b"\n")
