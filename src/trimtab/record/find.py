"""Finds run directories, and says where they are when a path holds none."""

from __future__ import annotations

import contextlib
from datetime import datetime
from itertools import islice
from pathlib import Path

from trimtab.core.errors import RecordError
from trimtab.core.files import open_regular
from trimtab.record import decode
from trimtab.record.format import LINES_NAME

_HEAD_LINES = 20  # the run line is the first, or one of the first
_HEAD_BYTES = 1_000_000  # of one of them


def find_run(path: Path | str = "last") -> Path:
    """The run directory meant by `path`: itself, the newest one inside it, or for `"last"` the newest in `./runs`.

    Newest is by the start time in the record: a copy or a `touch` does not make a run newer.
    """
    path = Path("runs") if str(path) == "last" and not Path("last").exists() else Path(path)
    if path.name == LINES_NAME and path.is_file():
        path = path.parent
    if (path / LINES_NAME).is_file():
        return path
    for parent in (path, path / "runs"):
        runs = _runs_in(parent)
        if runs:
            return max(runs, key=lambda run: (_started_s(run), run.name))
    raise missing(path)


def missing(path: Path) -> RecordError:
    """The error for a path without a record; it lists the run directories around it."""
    near = next(filter(None, map(_runs_in, (path, path / "runs", path.parent, path.parent / "runs"))), [])
    near.sort(key=lambda run: (_started_s(run), run.name), reverse=True)
    what = f"{path} holds no {LINES_NAME}" if path.is_dir() else f"there is no folder {path}"
    hint = "; runs nearby: " + ", ".join(str(run) for run in near[:5]) if near else "; there is no run nearby"
    return RecordError(f"{what}: expected a run directory (a folder with {LINES_NAME}, such as runs/<id>){hint}")


def _runs_in(parent: Path) -> list[Path]:
    try:
        return sorted(child for child in parent.iterdir() if (child / LINES_NAME).is_file())
    except OSError:
        return []


def _started_s(run: Path) -> float:
    """When the run started, as seconds since 1970; before everything else where that is not known."""
    with contextlib.suppress(OSError), open_regular(run / LINES_NAME) as file:
        for line in islice(iter(lambda: file.readline(_HEAD_BYTES), b""), _HEAD_LINES):
            with contextlib.suppress(*decode.DAMAGE):
                data = decode.parse_line(line)
                if data["t"] == "run" and "started" in data:
                    return datetime.fromisoformat(data["started"]).timestamp()
    return float("-inf")
