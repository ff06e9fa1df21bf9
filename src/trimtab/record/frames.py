"""A run as columns: its steps, its findings, its layers; for pandas, Arrow, CSV and Parquet."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from numpy.typing import NDArray

from trimtab.core.errors import InputError, MissingPackageError
from trimtab.core.printable import printable
from trimtab.core.types import Finding

if TYPE_CHECKING:
    import pandas
    import pyarrow

    from trimtab.record.reader import Run

WHAT = ("steps", "findings", "layers")
Columns = dict[str, list[Any] | NDArray[Any]]
_PIECE = 100_000  # rows


def columns_of(run: Run, what: str = "steps") -> Columns:
    """All of it at once: the name of each column and its values."""
    pieces = list(pieces_of(run, what))
    if len(pieces) == 1:
        return pieces[0]
    return {name: _joined([piece[name] for piece in pieces]) for name in pieces[0]}


def _joined(parts: list[list[Any] | NDArray[Any]]) -> list[Any] | NDArray[Any]:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [value for part in parts for value in part]


def pieces_of(run: Run, what: str = "steps") -> Iterator[Columns]:
    """The same columns, in pieces of bounded size; at least one, if an empty one."""
    if what == "steps":
        yield from _steps(run)
    elif what == "findings":
        yield _findings(run)
    elif what == "layers":
        yield from _layers(run)
    else:
        raise InputError(f"a run has no table {what!r}; expected one of {', '.join(WHAT)}")


def _steps(run: Run) -> Iterator[Columns]:
    lines = run.lines()
    names = list(dict.fromkeys(name for line in lines for name in line.scalars))
    for start in range(0, max(len(lines), 1), _PIECE):
        some = lines[start : start + _PIECE]
        columns: Columns = {
            "step": np.array([line.step for line in some], np.int64),
            "branch": np.array([line.branch for line in some], np.int64),
            "phase": [line.phase for line in some],
            "optimizer": [run.layouts[line.layout].optimizer for line in some],
        }
        for name in names:
            # A number that is called like one of ours does not replace it.
            unlike = name if name not in ("step", "branch", "phase", "optimizer") else f"{name} (scalar)"
            columns[unlike] = np.array([line.scalars.get(name, np.nan) for line in some], np.float64)
        yield columns


def _findings(run: Run) -> Columns:
    found: list[Finding] = [finding for verdict in run.verdicts for finding in verdict.findings]
    return {
        "step": np.array([f.step for f in found], np.int64),
        "optimizer": [f.optimizer for f in found],
        "code": [f.code for f in found],
        "name": [f.name for f in found],
        "severity": [f.severity.name.lower() for f in found],
        "streak": np.array([f.streak for f in found], np.int64),
        "message": [f.message for f in found],
        "subject": ["; ".join(f.subject) for f in found],
        "advice": ["; ".join(f.advice) for f in found],
    }


def _layers(run: Run) -> Iterator[Columns]:
    """One row per step and tensor; a column that was not measured is NaN."""
    every = list(dict.fromkeys(str(c) for layout in run.layouts.values() for c in layout.columns))
    heads: tuple[str, ...] = ("step", "branch", "optimizer", "kind", "name")
    rows: dict[str, list[Any]] = {name: [] for name in (*heads, *every)}
    yielded = False
    for sample in run.samples():
        num, layout = len(sample.table), sample.layout
        for name, values in (
            ("step", [sample.step] * num),
            ("branch", [sample.branch] * num),
            ("optimizer", [layout.optimizer] * num),
            ("kind", [str(k) for k in layout.kinds]),
            ("name", list(layout.names)),
        ):
            rows[name] += values
        known = {str(column): sample.table[:, i].tolist() for i, column in enumerate(layout.columns)}
        for name in every:
            rows[name] += known.get(name, [float("nan")] * num)
        if len(rows["step"]) >= _PIECE:
            yield _typed(rows, every)
            rows, yielded = {name: [] for name in rows}, True
    if rows["step"] or not yielded:
        yield _typed(rows, every)


def _typed(rows: dict[str, list[Any]], numbers: list[str]) -> Columns:
    kinds = {"step": np.int64, "branch": np.int64} | dict.fromkeys(numbers, np.float32)
    return {name: np.array(values, kinds[name]) if name in kinds else values for name, values in rows.items()}


def to_pandas(run: Run, what: str = "steps") -> pandas.DataFrame:
    """A table of pandas, which must be installed."""
    return _package("pandas").DataFrame(columns_of(run, what))


def to_arrow(run: Run, what: str = "steps") -> pyarrow.Table:
    """A table of Arrow; needs pyarrow."""
    return _package("pyarrow").table(columns_of(run, what))


def write_csv(run: Run, what: str, to: TextIO) -> int:
    """Write CSV with a header; how many rows. NaN is `nan`; a number that was not measured is `nan`, too.

    A text that a spreadsheet would take for a formula begins with an apostrophe; what a terminal would act on is
    escaped.
    """
    writer = csv.writer(to, lineterminator="\n")
    num = 0
    for piece in pieces_of(run, what):
        if not num:
            writer.writerow([_harmless(name) for name in piece])
        lists = [values.tolist() if isinstance(values, np.ndarray) else values for values in piece.values()]
        for row in zip(*lists, strict=True):
            writer.writerow([_harmless(value) if isinstance(value, str) else value for value in row])
            num += 1
    return num


def _harmless(text: str) -> str:
    text = printable(text).encode("utf-8", "replace").decode()
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def write_parquet(run: Run, what: str, path: Path) -> int:
    """Write a Parquet file in pieces of bounded size; how many rows. Needs pyarrow."""
    arrow, parquet = _package("pyarrow"), _package("pyarrow.parquet", "pyarrow")
    writer, num = None, 0
    try:
        for piece in pieces_of(run, what):
            table = arrow.table(piece)
            writer = parquet.ParquetWriter(path, table.schema) if writer is None else writer
            writer.write_table(table)
            num += table.num_rows
    finally:
        if writer is not None:
            writer.close()
    return num


def _package(name: str, of: str = "") -> Any:
    try:
        return sys.modules.get(name) or import_module(name)
    except ImportError as error:
        package = of or name
        raise MissingPackageError(
            f"this needs {package}, which cannot be imported ({error}): pip install {package}"
        ) from error
