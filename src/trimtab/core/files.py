"""Files of others: opened only if they are files, and measured before they are read."""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path

JSON_MEMORY = 100_000_000
"""Bytes that the values of one JSON text may take in memory, beside the text itself."""
_COSTS = ((b"{", 190), (b"[", 64), (b",", 60), (b":", 60))  # bytes per value that each of these stands for, at most
_HOLLOW = 200_000_000


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; OSError for a pipe or a device, which could be read without an end."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(f"{path} is not a regular file")
    return io.BufferedReader(io.FileIO(fd, "rb"))


def is_hollow(info: os.stat_result) -> bool:
    """Whether hardly any of a large file was ever written; file systems that compress store far more of real data."""
    blocks = getattr(info, "st_blocks", None)
    return blocks is not None and info.st_size > _HOLLOW and blocks * 512 < info.st_size // 20


def json_memory(data: bytes) -> int:
    """About how many bytes the values of a JSON text take once it is read; quick, and rather too much than too little.

    Example:
        >>> json_memory(b'{"a": [1, 2]}')
        374
    """
    return sum(data.count(mark) * cost for mark, cost in _COSTS)
