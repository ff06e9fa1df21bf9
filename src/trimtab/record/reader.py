"""Finds run directories and reads a record back, while it is being written, after a crash, or with parts damaged."""

from __future__ import annotations

import contextlib
import io
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from trimtab.core.config import DEFAULT_DIR
from trimtab.core.errors import RecordError
from trimtab.core.files import open_regular
from trimtab.core.notebook import box, curve_svg
from trimtab.core.printable import printable
from trimtab.core.types import F32, BrainState, Closing, Decision, Finding, Layout, Outcome, RunInfo, Sample, Verdict
from trimtab.record import format as decode
from trimtab.record.columns import Keep, SampleColumns
from trimtab.record.format import (
    FIRST_BYTES,
    GIVE_BACK,
    KINDS,
    LINES_NAME,
    TABLES_NAME,
    Buffer,
    SampleLine,
    TableEntry,
    Thinned,
    intact,
    map_tables,
    release,
    scan_tables,
    table_values,
    view_tables,
)
from trimtab.record.frames import to_arrow, to_pandas

if TYPE_CHECKING:
    import pandas
    import pyarrow

__all__ = ["Run", "RunFollower", "find_run", "is_complete", "is_of_rank", "ranks_in", "read_run", "runs_in"]

_MAX_PROBLEMS = 100  # of one kind; a file of noise need not be described line by line
_MAX_BAD = 50_000  # damaged lines, after which the rest of a file is not worth the time
_PIECE = 1 << 20
_BLOCK = 1 << 21  # floats of the tables that are looked at together
_INT64 = 2**63  # no line has a number beyond it


class Run:
    """The record of a run in memory; tables stay on disk and are copied out one by one.

    `path` is a run directory, or a directory of runs: then the newest is read. Without one it is the newest in
    `./trimtab_runs`. `problems` says in words what could not be read; everything else is what could.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import numpy as np
        >>> from trimtab import Run
        >>> from trimtab.core.types import Layout, Sample
        >>> from trimtab.record.writer import RunWriter
        >>> folder = tempfile.mkdtemp() + "/first"
        >>> writer = RunWriter(Path(folder))
        >>> layout = Layout(names=(), kinds=(), numel=())
        >>> for step in range(3):
        ...     table = np.empty((0, 7), np.float32)
        ...     writer.write(Sample(step=step, layout=layout, table=table, scalars={"loss": 1.0 / (1 + step)}))
        >>> writer.close()
        >>> run = Run(folder)
        >>> run
        <trimtab.Run first: 3 steps, 0 findings, not closed>
        >>> steps, losses = run.series("loss")
        >>> losses.round(2).tolist()
        [1.0, 0.5, 0.33]
    """

    def __init__(self, path: Path | str | None = None) -> None:
        self._begin(find_run(path))
        _load(self)

    def _begin(self, folder: Path, keep: Keep | None = None) -> None:
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
        self._samples = SampleColumns(keep)
        self._entries: dict[int, TableEntry] = {}
        self._buffer: Buffer = b""

    def __repr__(self) -> str:
        name = (self.info.run_id if self.info else "") or self.folder.name
        ending = self.closing.reason if self.closing is not None else "not closed"
        num_steps, num_findings = self.num_steps, len(self.findings)
        return printable(
            f"<trimtab.Run {name}: {num_steps:,} step{'s' * (num_steps != 1)}, "
            f"{num_findings:,} finding{'s' * (num_findings != 1)}, {ending}>",
            one_line=True,
        )

    def _repr_html_(self) -> str:
        info, ending = self.info, self.closing.reason if self.closing is not None else "not closed"
        facts: list[tuple[str, object]] = [("steps", f"{self.num_steps:,}"), ("findings", len(self.findings))]
        facts += [("model", info.model), ("started", info.started[:19])] if info is not None else []
        _, losses = self.series("loss", optimizer=next(iter(self.optimizers), ""))
        name = (info.run_id if info is not None else "") or self.folder.name
        facts.append(("ended", ending))
        return box(f"trimtab run {name}", facts, self.findings, curve_svg(losses.tolist(), "loss"))

    @property
    def num_steps(self) -> int:
        """Training steps of all optimizers: as counted at the end, else as recorded so far."""
        if self.closing is not None and self.closing.steps:
            return sum(self.closing.steps.values())
        return sum(np.unique(self.steps(optimizer)).size for optimizer in self.optimizers)

    def lines(self) -> Sequence[SampleLine]:
        """Every sample without its table, in the order written."""
        return self._samples

    def to_pandas(self, what: str = "steps") -> pandas.DataFrame:
        """The steps, findings or layers of this run as a table of pandas, which must be installed.

        `what` is `"steps"` (one row per step and validation, one column per number), `"findings"`, or `"layers"` (one
        row per step and tensor).
        """
        return to_pandas(self, what)

    def to_arrow(self, what: str = "steps") -> pyarrow.Table:
        """The same as a table of Arrow; needs pyarrow."""
        return to_arrow(self, what)

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self._samples)

    @property
    def optimizers(self) -> tuple[str, ...]:
        """Whose steps were recorded; `("",)` where there is only one optimizer."""
        return tuple(dict.fromkeys(self.layouts[layout].optimizer for layout in self._samples.layouts))

    @property
    def findings(self) -> list[Finding]:
        """The first finding of each incident, in order."""
        return [finding for verdict in self.verdicts for finding in verdict.findings if finding.streak == 1]

    def samples(self, start: int = 0) -> Iterator[Sample]:
        """Every sample in the order it was written, from number `start` on.

        Where a table was thinned out or damaged the sample has no rows and a layout without rows: not measured.
        """
        for line in self._samples.since(start):
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
        return self._samples.series(name, phase, lambda layout: self.layouts[layout].optimizer == optimizer)

    def scalars(self, optimizer: str = "", phase: str = "train") -> tuple[str, ...]:
        """The names that `series` has values for."""
        return self._samples.names(phase, lambda layout: self.layouts[layout].optimizer == optimizer)

    def steps(self, optimizer: str = "", phase: str = "train") -> NDArray[np.int64]:
        """The step of every sample, in the order written."""
        return self._samples.steps(phase, lambda layout: self.layouts[layout].optimizer == optimizer)

    def table_blocks(self) -> Iterator[tuple[NDArray[np.int64], Layout, F32]]:
        """The tables of all training samples in blocks of one layout: steps, layout, and a table for each step.

        Far faster than `samples`. Memory of what was read is given back on the way.
        """
        entries = list(self._entries.values())
        steps = np.array([entry.step for entry in entries], np.int64)
        given_back = 0
        for start, end in self._stretches(entries):
            first, layout = entries[start], self.layouts[entries[start].layout]
            tables = view_tables(self._buffer, first, end - start)
            yield steps[start:end], layout, tables.reshape(end - start, -1, len(layout.columns))
            if first.offset - given_back > GIVE_BACK:
                given_back = first.offset
                release(self._buffer)

    def _stretches(self, entries: Sequence[TableEntry]) -> Iterator[tuple[int, int]]:
        """From where to where entries of training samples have one layout and lie side by side."""
        if not entries:
            return
        table = _as_rows(entries)
        wanted = self._fitting_all(table, "train")
        offset, layout, num_floats = table[:, 0], table[:, 1], table[:, 5]
        aside = np.diff(offset) != entries[0].size - 4 * entries[0].num_floats + 4 * num_floats[:-1]
        ends = aside | (np.diff(layout) != 0) | (np.diff(num_floats) != 0) | (np.diff(wanted.astype(np.int8)) != 0)
        for start, end in pairwise([0, *(np.flatnonzero(ends) + 1).tolist(), len(entries)]):
            if wanted[start]:
                most = max(_BLOCK // max(entries[start].num_floats, 1), 1)
                yield from ((at, min(at + most, end)) for at in range(start, end, most))

    def _fitting_all(self, entries: NDArray[np.int64], phase: str = "") -> NDArray[np.bool_]:
        """Which of these tables, one per row, belong to a sample; `phase` narrows it to those of one."""
        fits = np.zeros(len(entries), bool)
        _, layouts, branches, steps, seqs, sizes, _ = entries.T
        for layout, its_phase, seq, step, branch in self._samples.with_tables():
            if phase and its_phase != phase:
                continue
            known = self.layouts[layout]
            order = np.argsort(seq)
            seq, step, branch = seq[order], step[order], branch[order]
            at = np.minimum(np.searchsorted(seq, seqs), len(seq) - 1)
            same = (seq[at] == seqs) & (step[at] == steps) & (branch[at] == branches) & (layouts == layout)
            fits |= same & (sizes == len(known.names) * len(known.columns))
        return fits

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
        return self._fitting(line.seq, line.layout, line.step, line.branch) if line.num_floats else None

    def _fitting(self, seq: int, layout: int, step: int, branch: int) -> TableEntry | None:
        entry = self._entries.get(seq)
        if entry is None:
            return None
        known = self.layouts[layout]
        wanted = (layout, step, branch, len(known.names) * len(known.columns))
        return entry if (entry.layout, entry.step, entry.branch, entry.num_floats) == wanted else None


def read_run(folder: Path | str, *, tables: bool = True, keep: Keep | None = None) -> Run:
    """Read the record in `folder`; RecordError where there is none, or one of a newer trimtab.

    A record can be read while it is written. Without `tables` samples come without them, and with `keep` only the
    scalars are kept whose names it wants: a large record is read much sooner, and takes less memory.
    """
    run = Run.__new__(Run)
    run._begin(Path(folder))
    _load(run, tables=tables, keep=keep)
    return run


def _load(run: Run, *, tables: bool = True, keep: Keep | None = None) -> None:
    path = run.folder / LINES_NAME
    for _ in range(3):
        try:
            number = path.stat().st_ino
            run._begin(run.folder, keep)
            _read_lines(run, path)
            if tables:
                _read_tables(run)
            if path.stat().st_ino == number:
                break  # else it was thinned between the two files: lines and tables do not belong together
        except (FileNotFoundError, NotADirectoryError):
            raise missing(run.folder) from None
        except RecordError:
            raise
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
    if tables:
        _note_lost(run)


class RunFollower:
    """Reads a record while it grows: every `update` takes in the lines that were added since the last one.

    `run` is always the record so far. A record that was thinned or replaced is read again from its beginning.
    """

    def __init__(self, folder: Path | str, *, tables: bool = True) -> None:
        self.run = Run.__new__(Run)
        self.run._begin(Path(folder))
        self._tables = tables
        self._number = self._offset = self._tables_end = 0

    def update(self) -> bool:
        """Take in what is new; whether there was anything. RecordError where there is no record to read."""
        path = self.run.folder / LINES_NAME
        try:
            with open_regular(path) as file:
                now = os.fstat(file.fileno())
                fresh = now.st_ino != self._number or now.st_size < self._offset
                if fresh:
                    self.run._begin(self.run.folder)
                    self._number, self._offset, self._tables_end = now.st_ino, 0, 0
                if self._offset == 0:
                    _check_beginning(path, file.read(len(FIRST_BYTES)))
                file.seek(self._offset)
                grown = self._take(file, path)
        except (FileNotFoundError, NotADirectoryError):
            raise missing(self.run.folder) from None
        except RecordError:
            raise
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror or error}") from error
        if grown and self._tables:
            self._tables_end = _read_tables(self.run, start=self._tables_end)
        return grown or fresh

    def _take(self, file: io.BufferedReader, path: Path) -> bool:
        before, rest = self._offset, b""
        while piece := file.read(_PIECE):
            lines, newline, rest = (rest + piece).rpartition(b"\n")
            self._offset += len(lines) + len(newline)
            for _, line in self.run._samples.read_block(lines + newline):
                try:
                    parsed = decode.parse_line(line)
                    if parsed["t"] in KINDS:
                        _take(self.run, parsed, path, line)
                except decode.DAMAGE as error:
                    if len(self.run.problems) < _MAX_PROBLEMS:
                        self.run.problems.append(f"a line of {LINES_NAME} is damaged: {_brief(error)}"[:300])
            if len(rest) > decode.MAX_LINE:
                break
        return self._offset > before


def _check_beginning(path: Path, begins: bytes) -> None:
    if not begins:
        raise RecordError(f"{path} is empty: the run has not written anything yet; try again once it made a step")
    if not begins.startswith(b"{"):
        raise RecordError(f"{path} is not a record of trimtab (it begins with {begins[:40]!r}); expected JSON lines")


def is_complete(folder: Path | str) -> bool:
    """Whether the record in `folder` was closed; reads its end only."""
    try:
        with (Path(folder) / LINES_NAME).open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - _PIECE, 0))
            lines = file.read().splitlines(keepends=True)
    except OSError:
        return False
    return bool(lines) and lines[-1].startswith(b'{"t":"close"') and lines[-1].endswith(b"\n")


def _read_lines(run: Run, path: Path) -> None:
    ours, unknown = False, 0
    bad: list[str] = []
    first = b""
    for line, whole, number in _raw_lines(path, run._samples):
        first = first or line
        try:
            parsed = decode.parse_line(line)
            known = parsed["t"] in KINDS
            ours, unknown = ours or known, unknown + (not known)
            if known:
                _take(run, parsed, path, line)
        except decode.DAMAGE as error:
            if not whole:
                ours = ours or FIRST_BYTES.startswith(line[: len(FIRST_BYTES)])
                bad.append(f"{LINES_NAME} line {number} is incomplete ({len(line)} bytes): torn, or being written now")
            else:
                bad.append(f"{LINES_NAME} line {number} is damaged and was skipped: {_brief(error)}"[:300])
            if len(bad) > _MAX_BAD:
                bad = [*bad[:_MAX_PROBLEMS], f"{LINES_NAME} is damaged almost everywhere; it was read to line {number}"]
                break
    if not path.stat().st_size:
        raise RecordError(f"{path} is empty: the run has not written anything yet; try again once it made a step")
    if not ours:
        raise RecordError(
            f"{path} is not a record of trimtab (it begins with {first[:40]!r}); expected JSON lines that begin with "
            f"{FIRST_BYTES.decode()!r}: is this the folder of another tool?"
        )
    run.problems += _shorten(bad)
    if unknown:
        run.problems.append(f"{LINES_NAME} has {unknown} lines of a kind unknown to this trimtab; they were skipped")


def _raw_lines(path: Path, samples: SampleColumns) -> Iterator[tuple[bytes, bool, int]]:
    """Every line that `samples` did not take, whether it is whole, and its number.

    Read in pieces, because a damaged line may have no end.
    """
    before = 1
    with open_regular(path) as file:
        rest = b""
        while piece := file.read(_PIECE):
            end = piece.rfind(b"\n") + 1
            lines, rest = (rest + piece[:end], piece[end:]) if end else (b"", rest + piece)
            yield from ((line, True, before + i) for i, line in samples.read_block(lines))
            before += lines.count(b"\n")
            if len(rest) > decode.MAX_LINE:
                break
        if rest:
            yield rest, False, before


def _brief(error: Exception) -> str:
    try:
        return str(error)
    except (ValueError, RecursionError):  # it quotes what cannot be shown
        return type(error).__name__


def _take(run: Run, data: dict[str, object], path: Path, raw: bytes) -> None:
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
            run._samples.add(line, raw)
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


def _read_tables(run: Run, start: int = 0) -> int:
    """Take in the tables that lie behind `start`; where the last whole one ends."""
    path = run.folder / TABLES_NAME
    try:
        run._buffer = map_tables(path)
    except FileNotFoundError:
        if any(run._samples.with_tables()):
            run.problems.append(f"{TABLES_NAME} is missing: samples come without their tables")
        return start
    except OSError as error:
        run.problems.append(f"{TABLES_NAME} cannot be read ({error}): samples come without their tables")
        return start
    entries, problems, end = scan_tables(run._buffer, start)
    bad = [f"{TABLES_NAME}: {problem}" for problem in problems]
    given_back = 0
    for entry, sound in zip(entries, intact(run._buffer, entries), strict=True):
        if sound and entry.seq < _INT64:
            run._entries[entry.seq] = entry
            if entry.offset - given_back > GIVE_BACK:
                given_back = entry.offset
                release(run._buffer)
        else:
            bad.append(f"{TABLES_NAME}: the table of step {entry.step} is damaged and was skipped")
    if not start:  # of a record that grows the end is being written just now
        run.problems += _shorten(bad)
    return end


def _as_rows(entries: Iterable[TableEntry]) -> NDArray[np.int64]:
    """Entries as numbers, one row for each."""
    return np.fromiter(chain.from_iterable(entries), np.int64).reshape(-1, len(TableEntry._fields))


def _note_lost(run: Run) -> None:
    there: NDArray[np.int64] | None = None
    lost: list[int] = []
    for layout, _, seq, step, _ in run._samples.with_tables():
        due = seq >= run._complete_seq(run.layouts[layout].optimizer)
        if not due.any():
            continue
        if there is None:  # only where it is needed: most of a long record was thinned, and says so
            entries = _as_rows(run._entries.values())
            there = entries[run._fitting_all(entries), 4]
        lost += step[due][~np.isin(seq[due], there)].tolist()
    if lost and os.path.exists(run.folder / TABLES_NAME):
        run.problems.append(f"{len(lost)} samples lost their table, the first at step {min(lost)}")


def _shorten(problems: list[str]) -> list[str]:
    rest = len(problems) - _MAX_PROBLEMS
    return problems if rest <= 0 else [*problems[:_MAX_PROBLEMS], f"and {rest} more like the last one"]


USUAL_DIRS = (DEFAULT_DIR, "runs")
"""Where records go by default, and where they went in earlier versions."""
_HEAD_LINES = 20  # the run line is the first, or one of the first
_HEAD_BYTES = 1_000_000  # of one of them
_RUN_ID = re.compile(r"(\d{8}-\d{6})-\d+-[0-9a-f]{4}(-rank\d+)?(-\d+)?")
"""How a run is named that was not given a name."""
_RANK = re.compile(r"rank-\d+")


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
    if ranks := ranks_in(path):
        return ranks[min(ranks)]
    return _newest([path]) or _newest(path / name for name in USUAL_DIRS) or _raise(path)


def missing(path: Path) -> RecordError:
    """The error for a path without a record; it lists the run directories around it."""
    near: list[Path] = []
    for around in (path, path.parent):
        for parents in ([around], [around / name for name in USUAL_DIRS]):
            near = near or [run for parent in parents for run in runs_in(parent) if has_record(run)]
    near.sort(key=_age, reverse=True)
    what = f"{path} holds no {LINES_NAME}" if path.is_dir() else f"there is no folder {path}"
    hint = "; runs nearby: " + ", ".join(str(run) for run in near[:5]) if near else "; there is no run nearby"
    return RecordError(
        f"{what}: expected a run directory (a folder with {LINES_NAME}, such as {DEFAULT_DIR}/<id>){hint}"
    )


def is_of_rank(folder: Path) -> bool:
    """Whether this is the folder of one process inside that of the whole run.

    Example:
        >>> is_of_rank(Path("trimtab_runs/20260101-000000-00001-0a1b/rank-3")), is_of_rank(Path("runs/rank3"))
        (True, False)
    """
    return _RANK.fullmatch(folder.name) is not None


def ranks_in(folder: Path) -> dict[int, Path]:
    """The records of the other processes of a run, by rank: each in `rank-k` inside the folder of rank 0."""
    found = [child for child in runs_in(folder) if is_of_rank(child)]
    return dict(sorted((int(child.name.removeprefix("rank-")), child) for child in found))


def _raise(path: Path) -> Path:
    raise missing(path)


def _newest(parents: Iterable[Path]) -> Path | None:
    runs = sorted((run for parent in parents for run in runs_in(parent)), key=_age)
    if not runs:
        return None
    newest = runs[-1]
    if has_record(newest):
        return newest
    if ranks := ranks_in(newest):  # rank 0 recorded nothing, or on another machine
        return ranks[min(ranks)]
    older = next((run for run in reversed(runs) if has_record(run)), None)
    instead = f"; the newest run with a record is {older}: name it to see it" if older is not None else ""
    raise RecordError(
        f"the newest run, {newest}, has no record: {LINES_NAME} is missing or empty, because the run was ended before "
        f"its first line was written, or because somebody deleted it{instead}"
    )


def has_record(run: Path) -> bool:
    """Whether a run directory holds a record that is not empty."""
    try:
        return (run / LINES_NAME).stat().st_size > 0
    except OSError:
        return False


def runs_in(parent: Path) -> list[Path]:
    """Every folder with a record, or with the name of a run: that one should have one."""
    try:
        children = sorted(child for child in parent.iterdir() if not child.name.startswith("."))
        return [c for c in children if (c / LINES_NAME).is_file() or (_RUN_ID.fullmatch(c.name) and c.is_dir())]
    except OSError:
        return []


def _age(run: Path) -> tuple[float, str]:
    return started_s(run), run.name


def started_s(run: Path) -> float:
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
