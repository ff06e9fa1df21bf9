"""Keeps a record within its bound: thins what is old, keeps what is extreme or has findings.

One pass goes over the older half of what may go and drops of each adjacent pair the tamer one, so the record gets
coarser with age and its peaks survive. Passes are decided in memory; the files are rewritten once, under temporary
names, lines first: a reader or a crash in between sees tables that no line asks for, never the reverse.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trimtab.core.types import Column, Layout, Verdict
from trimtab.record import format as decode
from trimtab.record.format import Buffer, TableEntry, Thinned, map_tables, scan_tables, table_values, thinned_line

TEMPORARY = ".thinning"

_Ints = NDArray[np.int64]
_Floats = NDArray[np.float64]
_Bools = NDArray[np.bool_]
_HEAD = re.compile(rb'\{"t":"(sample|state|thinned)","seq":(\d+),')
_TINY = 1e-30  # below every loss that matters; keeps logs of zero finite


class _Survey:
    """What one pass over the lines collects: sizes, scores and which steps must stay."""

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, int]] = []  # seq, step, bytes
        self.groups: list[tuple[int, str]] = []  # layout and phase: only like is compared with like
        self.scores: list[tuple[float, float]] = []
        self.layouts: dict[int, Layout] = {}
        self.flagged: set[tuple[str, int]] = set()
        self.first_flagged: set[tuple[str, int]] = set()
        self.before = Thinned(0, 0, {})

    def note(self, raw: bytes) -> None:
        """Take in one line; a damaged one stays in the file and counts for nothing."""
        try:
            data = decode.parse_line(raw)
            match data["t"]:
                case "sample":
                    line = decode.to_sample_line(data)
                    self.samples.append((line.seq, line.step, len(raw)))
                    self.groups.append((line.layout, line.phase))
                    loss = line.scalars.get("loss", line.scalars.get("val_loss", 0.0))
                    self.scores.append((loss, line.scalars.get("grad_norm", 0.0)))
                case "layout":
                    self.layouts[decode.seq_of(data)] = decode.to_layout(data)
                case "verdict":
                    verdict = decode.to_event(data)
                    assert isinstance(verdict, Verdict)
                    self._flag(verdict)
                case "thinned":
                    self.before = decode.to_thinned(data)
        except decode.DAMAGE:
            return

    def _flag(self, verdict: Verdict) -> None:
        for finding in verdict.findings:
            for step in (verdict.step, finding.step):
                self.flagged.add((verdict.optimizer, step))
                if finding.streak <= 1:
                    self.first_flagged.add((verdict.optimizer, step))

    def optimizer(self, layout: int) -> str:
        """Whose samples have this layout."""
        return self.layouts[layout].optimizer if layout in self.layouts else ""


def _table_score(buffer: Buffer, entry: TableEntry, layout: Layout | None) -> float:
    """The largest L2 norm of a table; infinite where a tensor was not finite."""
    values = table_values(buffer, entry)
    if layout is not None and Column.L2 in layout.columns and values.size == len(layout.names) * len(layout.columns):
        values = values.reshape(-1, len(layout.columns))[:, layout.columns.index(Column.L2)]
    return float(values.max(initial=0.0)) if np.isfinite(values).all() else np.inf


def _losers(alive: _Ints, groups: _Ints, tamer: Callable[[_Ints, _Ints], _Bools], seqs: _Ints) -> _Ints:
    """The tamer one of each adjacent pair in the older half of `alive`; of all of it where half has no pair.

    Pairs further apart than most were thinned before and are spared, so old history gets evenly coarse, not empty.
    """
    for candidates in (alive[: len(alive) // 2], alive):
        lost = []
        for group in np.unique(groups[candidates]):
            members = candidates[groups[candidates] == group]
            first, second = members[0 : len(members) - 1 : 2], members[1::2]
            if len(first):
                gaps = seqs[second] - seqs[first]
                near = gaps <= np.median(gaps)
                first, second = first[near], second[near]
            lost.append(np.where(tamer(first, second), first, second))
        losers = np.concatenate(lost) if lost else np.empty(0, np.int64)
        if len(losers):
            return losers
    return np.empty(0, np.int64)


def _choose(
    seqs: _Ints,
    sizes: _Ints,
    table_sizes: _Ints,
    groups: _Ints,
    scores: _Floats,
    peaks: _Floats,
    stay: list[_Bools],
    goal: int,
) -> tuple[_Bools, _Bools]:
    """Which lines and which tables to keep so that together they take less than `goal` bytes, if that can be."""
    logs = np.log(np.maximum(np.nan_to_num(scores, nan=np.inf, neginf=np.inf, posinf=np.inf), _TINY))

    def tamer_sample(a: _Ints, b: _Ints) -> _Bools:
        with np.errstate(invalid="ignore"):  # inf - inf: both are extreme, so neither exceeds the other
            excess = np.nan_to_num(logs[a] - logs[b], nan=0.0)
        return np.asarray(excess.max(axis=1) < (-excess).max(axis=1))

    def tamer_table(a: _Ints, b: _Ints) -> _Bools:
        return np.asarray(peaks[a] < peaks[b])

    lines, tabs = np.ones(len(sizes), bool), table_sizes > 0
    for protected in stay:
        lost = np.ones(1, np.int64)
        while len(lost):
            line_bytes, table_bytes = int(sizes[lines].sum()), int(table_sizes[tabs].sum())
            if line_bytes + table_bytes < goal:
                return lines, tabs
            # Scalars say more per byte than tables do, so tables go first, down to a quarter of the whole.
            tables_turn = 4 * table_bytes > line_bytes + table_bytes
            for turn in (tables_turn, not tables_turn):
                alive = np.flatnonzero((tabs if turn else lines) & ~protected)
                lost = _losers(alive, groups, tamer_table if turn else tamer_sample, seqs)
                if len(lost):
                    tabs[lost] = False
                    if not turn:
                        lines[lost] = False
                    break
    return lines, tabs


def thin(lines_path: Path, tables_path: Path, *, goal: int, seq: int) -> None:
    """Rewrite both files so that together they take less than `goal` bytes, if that can be; `seq` is free to use."""
    survey = _Survey()
    with lines_path.open("rb") as file:
        for raw in file:
            survey.note(raw)
    buffer = map_tables(tables_path) if tables_path.exists() else b""
    num = len(survey.samples)
    where = {sample[0]: i for i, sample in enumerate(survey.samples)}
    entries: list[TableEntry | None] = [None] * num
    peaks = np.zeros(num)
    for entry in scan_tables(buffer)[0]:
        index = where.get(entry.seq)
        if index is not None:  # else a crash came between table and line: nobody will ask for it
            entries[index] = entry
            peaks[index] = _table_score(buffer, entry, survey.layouts.get(entry.layout))

    codes: dict[tuple[int, str], int] = {}
    groups = np.array([codes.setdefault(group, len(codes)) for group in survey.groups], dtype=np.int64)
    owners = [survey.optimizer(layout) for layout, _ in survey.groups]
    keys = [(owner, sample[1]) for owner, sample in zip(owners, survey.samples, strict=True)]
    sizes = np.array([sample[2] for sample in survey.samples], dtype=np.int64)
    keep_lines, keep_tables = _choose(
        np.array([sample[0] for sample in survey.samples], dtype=np.int64),
        sizes,
        np.array([entry.size if entry else 0 for entry in entries], dtype=np.int64),
        groups,
        np.array(survey.scores, dtype=np.float64).reshape(num, 2),
        peaks,
        # The second one only when all else is gone: of a long incident its beginning stays.
        [np.array([key in kept for key in keys], dtype=bool) for kept in (survey.flagged, survey.first_flagged)],
        goal - (lines_path.stat().st_size - int(sizes.sum())),
    )
    lost_tables = np.array([entry is not None for entry in entries], dtype=bool) & ~keep_tables
    complete = dict(survey.before.complete)
    for lost in np.flatnonzero(~keep_lines | lost_tables).tolist():
        sample_seq, step, _ = survey.samples[lost]
        if sample_seq >= complete.get(owners[lost], (-1, 0))[0]:
            complete[owners[lost]] = (sample_seq + 1, step + 1)
    total = Thinned(
        survey.before.samples + int((~keep_lines).sum()), survey.before.tables + int(lost_tables.sum()), complete
    )
    dropped = {survey.samples[i][0] for i in np.flatnonzero(~keep_lines)}
    try:
        _rewrite_lines(lines_path, dropped, total, seq)
        if buffer:
            kept = [entry for entry, keep in zip(entries, keep_tables, strict=True) if entry is not None and keep]
            _rewrite_tables(tables_path, buffer, kept)
    finally:  # a full disk must not stay full because of us
        for path in (lines_path, tables_path):
            path.with_name(path.name + TEMPORARY).unlink(missing_ok=True)


def _rewrite_lines(path: Path, dropped: set[int], total: Thinned, seq: int) -> None:
    temporary = path.with_name(path.name + TEMPORARY)
    with path.open("rb") as old, temporary.open("wb") as new:
        for raw in old:
            if not _obsolete(raw, dropped, total):
                new.write(raw)
        new.write(thinned_line(total, seq))
    os.replace(temporary, path)


def _obsolete(raw: bytes, dropped: set[int], total: Thinned) -> bool:
    found = _HEAD.match(raw)
    if found is None:
        return False
    if found[1] == b"sample":
        return int(found[2]) in dropped
    try:  # a replay cannot start before a gap, so older states are of no use
        return found[1] == b"thinned" or int(found[2]) < total.complete[str(decode.parse_line(raw)["optimizer"])][0]
    except decode.DAMAGE:
        return False


def _rewrite_tables(path: Path, buffer: Buffer, kept: list[TableEntry]) -> None:
    temporary = path.with_name(path.name + TEMPORARY)
    with temporary.open("wb") as new:
        for entry in kept:
            new.write(buffer[entry.offset : entry.offset + entry.size])
    os.replace(temporary, path)
