"""Finds run directories and reads a record back, while it is being written, after a crash, or with parts damaged."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab.core.config import DEFAULT_DIR
from trimtab.core.errors import RecordError
from trimtab.core.files import open_regular
from trimtab.core.types import BrainState, Closing, Decision, Finding, Layout, Outcome, RunInfo, Sample, Verdict
from trimtab.record import format as decode
from trimtab.record.format import (
    FIRST_BYTES,
    KINDS,
    LINES_NAME,
    TABLES_NAME,
    Buffer,
    SampleLine,
    TableEntry,
    Thinned,
    is_intact,
    map_tables,
    scan_tables,
    table_values,
)

__all__ = ["Run", "find_run", "read_run"]

_MAX_PROBLEMS = 100  # of one kind; a file of noise need not be described line by line
_MAX_BAD = 50_000  # damaged lines, after which the rest of a file is not worth the time
_PIECE = 1 << 20


class Run:
    """A record in memory; tables stay on disk and are copied out one by one.

    `problems` says in words what could not be read; everything else is what could.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.info: RunInfo | None = None
        self.layouts: dict[int, Layout] = {}
        self.verdicts: list[Verdict] = []
        self.decisions: list[Decision] = []
        self.outcomes: list[Outcome] = []
        self.states: list[BrainState] = []
        self.closing: Closing | None = None
        self.thinned: Thinned | None = None
        self.problems: list[str] = []
        self._samples: list[SampleLine] = []
        self._entries: dict[int, TableEntry] = {}
        self._buffer: Buffer = b""

    def __repr__(self) -> str:
        name = self.info.run_id if self.info else self.folder.name
        return f"<Run {name}: {len(self._samples)} samples, {len(self.findings)} findings>"

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._samples)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Whose steps were recorded; `("",)` where there is only one optimizer."""
        return tuple(dict.fromkeys(self.layouts[line.layout].optimizer for line in self._samples))

    @property
    def findings(self) -> list[Finding]:
        """The first finding of each incident, in order."""
        return [finding for verdict in self.verdicts for finding in verdict.findings if finding.streak == 1]

    def samples(self) -> Iterator[Sample]:
        """Every sample in the order it was written.

        Where a table was thinned out or damaged the sample has no rows and a layout without rows: not measured.
        """
        for line in self._samples:
            layout = self.layouts[line.layout]
            entry = self._entry(line)
            if entry is not None:
                table = table_values(self._buffer, entry).reshape(-1, len(layout.columns))
            else:
                table = np.empty((0, len(layout.columns)), np.float32)
                if line.num_floats:
                    layout = Layout(names=(), kinds=(), numel=(), columns=layout.columns, optimizer=layout.optimizer)
            yield Sample(
                step=line.step,
                branch=line.branch,
                layout=layout,
                table=table,
                scalars=dict(line.scalars),
                phase=line.phase,
                notes=line.notes,
            )

    def series(
        self, name: str, optimizer: str = "", phase: str = "train"
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Steps and values of one scalar, in the order written (after a rewind steps go back)."""
        points = [
            (line.step, line.scalars[name])
            for line in self._samples
            if name in line.scalars and line.phase == phase and self.layouts[line.layout].optimizer == optimizer
        ]
        return np.array([p[0] for p in points], np.int64), np.array([p[1] for p in points], np.float64)

    def exact_from(self, optimizer: str = "") -> int | None:
        """The first step from which no sample or table is missing; 0 if complete, None if there is no such step."""
        lines = [line for line in self._samples if self.layouts[line.layout].optimizer == optimizer]
        complete_seq = self._complete_seq(optimizer)
        exact: int | None = None
        gap, last = True, -1
        for line in lines:
            if line.seq < complete_seq or self._lost(line):
                gap, exact = True, None
            elif line.phase == "train" and (gap or line.step > last + 1):
                gap, exact = False, line.step
            if line.phase == "train":
                last = line.step
        return exact

    def _complete_seq(self, optimizer: str) -> int:
        return self.thinned.complete.get(optimizer, (0, 0))[0] if self.thinned else 0

    def _lost(self, line: SampleLine) -> bool:
        return bool(line.num_floats) and self._entry(line) is None

    def _entry(self, line: SampleLine) -> TableEntry | None:
        entry = self._entries.get(line.seq) if line.num_floats else None
        layout = self.layouts[line.layout]
        fits = entry is not None and (entry.layout, entry.step, entry.branch, entry.num_floats) == (
            line.layout,
            line.step,
            line.branch,
            len(layout.names) * len(layout.columns),
        )
        return entry if fits else None


def read_run(folder: Path | str) -> Run:
    """Read the record in `folder`; RecordError where there is none, or one of a newer trimtab.

    A record can be read while it is written.
    """
    folder = Path(folder)
    path = folder / LINES_NAME
    for _ in range(3):
        try:
            number = path.stat().st_ino
            run = _read_lines(folder, path)
            _read_tables(run)
            if path.stat().st_ino == number:
                break  # else it was thinned between the two files: lines and tables do not belong together
        except (FileNotFoundError, NotADirectoryError):
            raise missing(folder) from None
        except RecordError:
            raise
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    _note_lost(run)
    return run


def _read_lines(folder: Path, path: Path) -> Run:
    run = Run(folder)
    ours, unknown = False, 0
    bad: list[str] = []
    first = b""
    number = 0
    for line, whole in _raw_lines(path):
        first = first or line
        number += 1
        try:
            parsed = decode.parse_line(line)
            known = parsed["t"] in KINDS
            ours, unknown = ours or known, unknown + (not known)
            if known:
                _take(run, parsed, path)
        except decode.DAMAGE as error:
            if not whole:
                ours = ours or FIRST_BYTES.startswith(line[: len(FIRST_BYTES)])
                bad.append(f"{LINES_NAME} line {number} is incomplete ({len(line)} bytes): torn, or being written now")
            else:
                bad.append(f"{LINES_NAME} line {number} is damaged and was skipped: {_brief(error)}"[:300])
            if len(bad) > _MAX_BAD:
                bad = [*bad[:_MAX_PROBLEMS], f"{LINES_NAME} is damaged almost everywhere; it was read to line {number}"]
                break
    if not number:
        raise RecordError(f"{path} is empty: the run has not written anything yet; try again once it made a step")
    if not ours:
        raise RecordError(
            f"{path} is not a record of trimtab (it begins with {first[:40]!r}); expected JSON lines that begin with "
            f"{FIRST_BYTES.decode()!r}: is this the folder of another tool?"
        )
    run.problems += _shorten(bad)
    if unknown:
        run.problems.append(f"{LINES_NAME} has {unknown} lines of a kind unknown to this trimtab; they were skipped")
    return run


def _raw_lines(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Every line, and whether it is whole; read in pieces, because a damaged line may have no end."""
    with open_regular(path) as file:
        rest = b""
        while piece := file.read(_PIECE):
            *lines, rest = (rest + piece).split(b"\n")
            yield from ((line, True) for line in lines)
            if len(rest) > decode.MAX_LINE:
                break
        if rest:
            yield rest, False


def _brief(error: Exception) -> str:
    try:
        return str(error)
    except (ValueError, RecursionError):  # it quotes what cannot be shown
        return type(error).__name__


def _take(run: Run, data: dict[str, object], path: Path) -> None:
    match data["t"]:
        case "run":
            decode.check_version(data, path)
            run.info = run.info or decode.to_info(data)
        case "layout":
            run.layouts[decode.seq_of(data)] = decode.to_layout(data)
        case "sample":
            line = decode.to_sample_line(data)
            if line.layout not in run.layouts:
                raise ValueError(f"its layout {line.layout} is not in the record")
            _check_step(line)
            run._samples.append(line)
        case "thinned":
            run.thinned = decode.to_thinned(data)
        case "lost":
            run.problems.append(str(decode.to_lost(data)))
        case _:
            _take_event(run, decode.to_event(data))


def _check_step(event: object) -> None:
    """Refuse a line about a step that never was; whatever it says, nothing can be drawn or compared there."""
    for name in ("step", "seen_at", "about", "at"):
        if (step := getattr(event, name, 0)) < 0:
            raise ValueError(f"{name} is {step}, expected a step from 0 on")


def _take_event(run: Run, event: object) -> None:
    _check_step(event)
    if isinstance(event, Verdict):
        run.verdicts.append(event)
    elif isinstance(event, Decision):
        run.decisions.append(event)
    elif isinstance(event, Outcome):
        run.outcomes.append(event)
    elif isinstance(event, BrainState):
        run.states.append(event)
    elif isinstance(event, Closing):
        run.closing = event


def _read_tables(run: Run) -> None:
    path = run.folder / TABLES_NAME
    try:
        run._buffer = map_tables(path)
    except FileNotFoundError:
        if any(line.num_floats for line in run._samples):
            run.problems.append(f"{TABLES_NAME} is missing: samples come without their tables")
        return
    except OSError as error:
        run.problems.append(f"{TABLES_NAME} cannot be read ({error}): samples come without their tables")
        return
    entries, problems, _ = scan_tables(run._buffer)
    bad = [f"{TABLES_NAME}: {problem}" for problem in problems]
    for entry in entries:
        if is_intact(run._buffer, entry):
            run._entries[entry.seq] = entry
        else:
            bad.append(f"{TABLES_NAME}: the table of step {entry.step} is damaged and was skipped")
    run.problems += _shorten(bad)


def _note_lost(run: Run) -> None:
    lost = [
        line.step
        for line in run._samples
        if run._lost(line) and line.seq >= run._complete_seq(run.layouts[line.layout].optimizer)
    ]
    if lost and os.path.exists(run.folder / TABLES_NAME):
        run.problems.append(f"{len(lost)} samples lost their table, the first at step {lost[0]}")


def _shorten(problems: list[str]) -> list[str]:
    rest = len(problems) - _MAX_PROBLEMS
    return problems if rest <= 0 else [*problems[:_MAX_PROBLEMS], f"and {rest} more like the last one"]


USUAL_DIRS = (DEFAULT_DIR, "runs")
"""Where records go by default, and where they went in earlier versions."""
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
                    return datetime.fromisoformat(str(data["started"])).timestamp()
    if named := _RUN_ID.fullmatch(run.name):
        with contextlib.suppress(ValueError):
            return datetime.strptime(named[1], "%Y%m%d-%H%M%S").replace(tzinfo=UTC).timestamp()
    return float("-inf")
