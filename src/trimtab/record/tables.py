"""The entries of `tables.f32`: each is a header of ten 32-bit words and the float32 rows it announces.

An entry says by itself which sample it belongs to (`seq`, and layout, branch and step for whoever reads the file
alone), so thinning never has to rewrite a line of `run.jsonl` because a table moved. The header has a check word of
its own: a damaged payload costs one table, and a damaged header is skipped by looking for the next good one.

    magic · layout · branch · step (2) · seq (2) · number of floats · CRC of the floats · CRC of the nine words before
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trimtab.core.files import is_hollow, open_regular
from trimtab.core.types import F32, Sample

MAGIC = b"TTb1"
_HEADER = struct.Struct("<4sIIqQIII")
_MAX_MISSES = 100_000  # places that look like the beginning of a table and are none
_CHECKED = _HEADER.size - 4  # every word but the last, which checks them

Buffer = bytes | mmap.mmap


class Entry(NamedTuple):
    """Where one table lies, and what it belongs to."""

    offset: int
    layout: int
    branch: int
    step: int
    seq: int
    num_floats: int
    crc: int

    @property
    def size(self) -> int:
        """Bytes on disk, header included."""
        return _HEADER.size + 4 * self.num_floats


def encode_table(sample: Sample, layout: int, seq: int) -> bytes:
    """The bytes of one entry; ValueError where the table does not fit its layout."""
    shape = (len(sample.layout.names), len(sample.layout.columns))
    if sample.table.shape != shape:
        raise ValueError(f"the table of step {sample.step} has shape {sample.table.shape}, its layout says {shape}")
    rows = np.ascontiguousarray(sample.table, dtype="<f4").tobytes()
    head = _HEADER.pack(MAGIC, layout, sample.branch, sample.step, seq, len(rows) // 4, zlib.crc32(rows), 0)[:_CHECKED]
    return head + struct.pack("<I", zlib.crc32(head)) + rows


def map_file(path: Path) -> Buffer:
    """The file, memory-mapped; empty bytes where it is empty, FileNotFoundError where there is none."""
    with open_regular(path) as file:
        if is_hollow(os.fstat(file.fileno())):
            raise OSError("hardly any of it was ever written")
        try:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # an empty file cannot be mapped
            return b""


def _entry(buffer: Buffer, offset: int) -> Entry | None:
    if offset + _HEADER.size > len(buffer):
        return None
    magic, layout, branch, step, seq, num_floats, crc, check = _HEADER.unpack_from(buffer, offset)
    if magic != MAGIC or zlib.crc32(buffer[offset : offset + _CHECKED]) != check:
        return None
    entry = Entry(offset, layout, branch, step, seq, num_floats, crc)
    return entry if offset + entry.size <= len(buffer) else None


def scan(buffer: Buffer) -> tuple[list[Entry], list[str], int]:
    """Every complete entry, what was wrong between them, and where the last one ends; payloads are not looked at."""
    entries: list[Entry] = []
    problems: list[str] = []
    at = misses = 0
    while at < len(buffer):
        entry = _entry(buffer, at)
        if entry is not None:
            entries.append(entry)
            at += entry.size
            continue
        found = buffer.find(MAGIC, at + 1)
        while found >= 0 and misses < _MAX_MISSES and _entry(buffer, found) is None:
            found, misses = buffer.find(MAGIC, found + 1), misses + 1
        if found < 0 or misses >= _MAX_MISSES:
            problems.append(f"the last {len(buffer) - at} bytes are an incomplete or damaged table")
            break
        problems.append(f"{found - at} damaged bytes at {at} skipped")
        at = found
    return entries, problems, entries[-1].offset + entries[-1].size if entries else 0


def floats(buffer: Buffer, entry: Entry) -> F32:
    """A copy of the entry's numbers, in one dimension."""
    return np.frombuffer(buffer, dtype="<f4", count=entry.num_floats, offset=entry.offset + _HEADER.size).astype(
        np.float32
    )


def intact(buffer: Buffer, entry: Entry) -> bool:
    """Whether the numbers are the ones that were written."""
    start = entry.offset + _HEADER.size
    with memoryview(buffer) as view, view[start : entry.offset + entry.size] as rows:
        return zlib.crc32(rows) == entry.crc
