"""All runs below a directory at a glance: what each record's first and last lines say, without reading the rest."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path

from trimtab.core.errors import RecordError
from trimtab.core.files import open_regular
from trimtab.core.types import Closing, RunInfo
from trimtab.record import format as decode
from trimtab.record.format import LINES_NAME, TABLES_NAME
from trimtab.record.reader import USUAL_DIRS, runs_in, started_s

QUIET_S = 60.0
"""A record of another machine that was not written to for this long is not taken for a live one."""
QUIET_HERE_S = 600.0
"""The same where the process is still there: a step may take minutes, and a number of a process is used again."""
_HEAD_LINES, _HEAD_BYTES, _TAIL_BYTES = 20, 1_000_000, 1 << 18


class State(StrEnum):
    """Whether a run is still going."""

    LIVE = "live"
    ENDED = "ended"
    NOT_CLOSED = "not closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """One run in a list; `problem` says why its record cannot be read."""

    folder: Path
    info: RunInfo | None
    started_s: float
    written_s: float
    num_steps: int
    size_bytes: int
    lines_bytes: int
    state: State
    closing: Closing | None
    problem: str = ""

    @property
    def name(self) -> str:
        """What the run is called."""
        return (self.info.run_id if self.info is not None else "") or self.folder.name

    @property
    def started(self) -> datetime | None:
        """When it started, in local time; None where nothing says so."""
        with contextlib.suppress(OverflowError, OSError, ValueError):
            return datetime.fromtimestamp(self.started_s, UTC).astimezone()
        return None


def list_runs(path: Path | str | None = None) -> list[RunEntry]:
    """Every run in a directory (without one, in `./trimtab_runs` and `./runs`), the newest first.

    A run directory is a list of one. RecordError where the directory does not exist.
    """
    if path is None:
        folders = [run for name in USUAL_DIRS for run in runs_in(Path(name))]
    else:
        path = Path(path)
        if not path.is_dir():
            raise RecordError(f"there is no folder {path}; expected a directory of runs, such as {USUAL_DIRS[0]}")
        folders = [path] if (path / LINES_NAME).is_file() else runs_in(path)
        folders = folders or [run for name in USUAL_DIRS for run in runs_in(path / name)]
    entries = [look_at(folder) for folder in folders]
    return sorted(entries, key=lambda e: (e.started_s, e.folder.name), reverse=True)


def look_at(folder: Path, now_s: float | None = None) -> RunEntry:
    """What the ends of a record say; never an error."""
    info: RunInfo | None = None
    closing: Closing | None = None
    num_steps, written_s, lines_bytes, problem = 0, 0.0, 0, ""
    try:
        with open_regular(folder / LINES_NAME) as file:
            stat = os.fstat(file.fileno())
            written_s, lines_bytes = stat.st_mtime, stat.st_size
            info = _head(islice(iter(lambda: file.readline(_HEAD_BYTES), b""), _HEAD_LINES), folder)
            file.seek(max(lines_bytes - _TAIL_BYTES, 0))
            num_steps, closing = _tail(file.read(_TAIL_BYTES).splitlines())
        if not lines_bytes:
            problem = "nothing was recorded yet"
    except FileNotFoundError:
        problem = f"{LINES_NAME} is missing"
    except RecordError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{LINES_NAME} cannot be read: {error.strerror or error}"
    now_s = time.time() if now_s is None else now_s
    return RunEntry(
        folder=folder,
        info=info,
        started_s=started_s(folder),
        written_s=written_s,
        num_steps=num_steps,
        size_bytes=lines_bytes + _size(folder / TABLES_NAME),
        lines_bytes=lines_bytes,
        state=State.ENDED if closing is not None else _state(info, now_s - written_s),
        closing=closing,
        problem=problem,
    )


def _head(lines: islice[bytes], folder: Path) -> RunInfo | None:
    for line in lines:
        with contextlib.suppress(*decode.DAMAGE):
            data = decode.parse_line(line)
            if data["t"] == "run":
                decode.check_version(data, folder / LINES_NAME)
                if (info := decode.to_info(data)) is not None:
                    return info
    return None


def _tail(lines: list[bytes]) -> tuple[int, Closing | None]:
    """How many steps were made by the last lines, and the closing line."""
    steps: dict[int, int] = {}
    closing: Closing | None = None
    for line in lines:
        with contextlib.suppress(*decode.DAMAGE):
            data = decode.parse_line(line)
            if data["t"] == "sample":
                sample = decode.to_sample_line(data)
                if sample.phase == "train":
                    steps[sample.layout] = max(sample.step + 1, steps.get(sample.layout, 0))
                closing = None  # a record that goes on after its end was continued
            elif data["t"] == "close":
                event = decode.to_event(data)
                closing = event if isinstance(event, Closing) else closing
    if closing is not None and closing.steps:
        return sum(closing.steps.values()), closing
    return max(steps.values(), default=0), closing


def _state(info: RunInfo | None, silent_s: float) -> State:
    here = info is not None and info.pid > 0 and info.host == socket.gethostname()
    if here and info is not None and not _is_alive(info.pid):
        return State.NOT_CLOSED
    return State.LIVE if silent_s < (QUIET_HERE_S if here else QUIET_S) else State.NOT_CLOSED


def _is_alive(pid: int) -> bool:
    if os.name != "posix":
        return True  # there a signal would end it
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _size(path: Path) -> int:
    """What a file takes on disk: most of a sparse one was never written."""
    try:
        stat = path.stat()
    except OSError:
        return 0
    blocks = getattr(stat, "st_blocks", None)
    return stat.st_size if blocks is None else min(stat.st_size, blocks * 512)
