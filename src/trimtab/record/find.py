"""Finds run directories, and says where they are when a path holds none."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from trimtab.core.config import DEFAULT_DIR
from trimtab.core.errors import RecordError
from trimtab.core.files import open_regular
from trimtab.record import decode
from trimtab.record.format import LINES_NAME

USUAL_DIRS = (DEFAULT_DIR, "runs")
"""Where records go unless told otherwise, and where they went in earlier versions."""
_HEAD_LINES = 20  # the run line is the first, or one of the first
_HEAD_BYTES = 1_000_000  # of one of them
_RUN_ID = re.compile(r"(\d{8}-\d{6})-\d+-[0-9a-f]{4}(-rank\d+)?(-\d+)?")
"""How a run is named that was not given a name."""


def find_run(path: Path | str | None = None) -> Path:
    """The run directory meant by `path`: itself, or the newest one inside it.

    Without a path (or with `"last"`) it is the newest in `./trimtab_runs` or `./runs`. Newest is by the start time in
    the record: a copy or a `touch` does not make a run newer. RecordError where the newest one has no record that
    could be read: an older one in its place would be taken for it.
    """
    if path is None or (str(path) == "last" and not Path("last").exists()):
        return _newest(Path(name) for name in USUAL_DIRS) or _raise(Path(DEFAULT_DIR))
    path = Path(path)
    if path.name == LINES_NAME and path.is_file():
        path = path.parent
    if (path / LINES_NAME).is_file():
        return path
    return _newest([path]) or _newest(path / name for name in USUAL_DIRS) or _raise(path)


def missing(path: Path) -> RecordError:
    """The error for a path without a record; it lists the run directories around it."""
    near: list[Path] = []
    for around in (path, path.parent):
        for parents in ([around], [around / name for name in USUAL_DIRS]):
            near = near or [run for parent in parents for run in _runs_in(parent) if _has_record(run)]
    near.sort(key=_age, reverse=True)
    what = f"{path} holds no {LINES_NAME}" if path.is_dir() else f"there is no folder {path}"
    hint = "; runs nearby: " + ", ".join(str(run) for run in near[:5]) if near else "; there is no run nearby"
    return RecordError(
        f"{what}: expected a run directory (a folder with {LINES_NAME}, such as {DEFAULT_DIR}/<id>){hint}"
    )


def _raise(path: Path) -> Path:
    raise missing(path)


def _newest(parents: Iterable[Path]) -> Path | None:
    runs = sorted((run for parent in parents for run in _runs_in(parent)), key=_age)
    if not runs:
        return None
    newest = runs[-1]
    if _has_record(newest):
        return newest
    older = next((run for run in reversed(runs) if _has_record(run)), None)
    instead = f"; the newest run with a record is {older}: name it to see it" if older is not None else ""
    raise RecordError(
        f"the newest run, {newest}, has no record: {LINES_NAME} is missing or empty, because the run was ended before "
        f"its first line was written, or because somebody deleted it{instead}"
    )


def _has_record(run: Path) -> bool:
    try:
        return (run / LINES_NAME).stat().st_size > 0
    except OSError:
        return False


def _runs_in(parent: Path) -> list[Path]:
    """Every folder with a record, or with the name of a run: that one should have one."""
    try:
        children = sorted(child for child in parent.iterdir() if not child.name.startswith("."))
        return [c for c in children if (c / LINES_NAME).is_file() or (_RUN_ID.fullmatch(c.name) and c.is_dir())]
    except OSError:
        return []


def _age(run: Path) -> tuple[float, str]:
    return _started_s(run), run.name


def _started_s(run: Path) -> float:
    """When the run started, as seconds since 1970: by its record, else by its name, else before everything else."""
    with contextlib.suppress(OSError), open_regular(run / LINES_NAME) as file:
        for line in islice(iter(lambda: file.readline(_HEAD_BYTES), b""), _HEAD_LINES):
            with contextlib.suppress(*decode.DAMAGE):
                data = decode.parse_line(line)
                if data["t"] == "run" and "started" in data:
                    return datetime.fromisoformat(data["started"]).timestamp()
    if named := _RUN_ID.fullmatch(run.name):
        with contextlib.suppress(ValueError):
            return datetime.strptime(named[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    return float("-inf")
