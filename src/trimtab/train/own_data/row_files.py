"""Rows of a user's own file: CSV (or `;`, tab, `|` between cells), JSON lines, Parquet. Each knows its place in it."""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import nearest_name
from trimtab.train.data_problems import DataError, refuse

BLANK = frozenset({"", "na", "n/a", "nan", "null", "?", "#n/a"})
"""What stands for a value that is not there, in any case."""
MAYBE_BLANK = frozenset({"none", "nil", "-"})
"""So do these among numbers, dates and names of files; among words each is one of them (a grade of none)."""
DELIMITED, JSON_LINES, PARQUET = (".csv", ".tsv", ".txt"), (".jsonl", ".ndjson"), (".parquet", ".pq")
ENDINGS = (*DELIMITED, *JSON_LINES, *PARQUET)
DELIMITERS = ",;\t|"
MOST_CELL = 2**24
TRAIN, VAL, TEST = "train", "val", "test"
PARTS = {"train": TRAIN, "training": TRAIN, "val": VAL, "valid": VAL, "validation": VAL, "dev": VAL}
PARTS |= {"test": TEST, "testing": TEST}
"""What a column `split` may hold, in any case, and which part each word means."""


def is_blank(cell: object, *, among_words: bool = False) -> bool:
    """Whether a cell holds nothing; among words `none` and `-` are something.

    Example:
        >>> [is_blank(cell) for cell in (None, " NA ", float("nan"), 0, "no")]
        [True, True, True, False, False]
        >>> is_blank("none"), is_blank("none", among_words=True)
        (True, False)
    """
    if isinstance(cell, str):
        word = cell.strip().lower()
        return word in BLANK or (not among_words and word in MAYBE_BLANK)
    return cell is None or (isinstance(cell, float) and cell != cell)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFile:
    """The cells of a file, column by column, and the line of each row (0 where a file has no lines)."""

    path: Path
    cells: dict[str, list[object]]
    lines: list[int]

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns, in the order of the file."""
        return tuple(self.cells)

    def where(self, row: int, column: str | None = None) -> str:
        """The place of a row for people, who count from 1.

        Example:
            >>> RowFile(path=Path("a.csv"), cells={"x": ["1"]}, lines=[2]).where(0, "x")
            "a.csv, row 1 (line 2), column 'x'"
        """
        line = f" (line {self.lines[row]})" if self.lines[row] else ""
        return f"{self.path}, row {row + 1}{line}" + (f", column {column!r}" if column is not None else "")

    def column(self, name: str, why: str) -> list[object]:
        """The cells of one column; InputError with the known names for any other."""
        if name not in self.cells:
            near = nearest_name(name, self.columns)
            hint = "" if near is None else f"did you mean {near!r}? "
            raise InputError(f"{self.path} has no column {name!r} ({why}); {hint}There are {', '.join(self.columns)}")
        return self.cells[name]


def read_rows(path: str | Path) -> RowFile:
    """Read a whole file by its ending; DataError with file and row for what cannot be read.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.csv"
        >>> _ = path.write_text("size;name\\n1;apple\\n2;pear\\n")
        >>> read_rows(path).cells
        {'size': ['1', '2'], 'name': ['apple', 'pear']}
    """
    path = Path(path)
    ending = path.suffix.lower()
    if not path.is_file():
        raise InputError(f"there is no file {path}; expected one that ends in {', '.join(ENDINGS)}")
    if ending in PARQUET:
        found = _parquet(path)
    elif ending in JSON_LINES:
        found = _json_lines(path)
    elif ending in DELIMITED:
        found = _delimited(path)
    else:
        raise InputError(f"{path} ends in {ending or 'nothing'}; expected {', '.join(ENDINGS)}")
    if not len(found):
        raise DataError(f"{path} has columns and no rows; expected at least one row")
    return found


def _delimited(path: Path) -> RowFile:
    csv.field_size_limit(min(MOST_CELL, sys.maxsize))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=_delimiter(file, path), strict=True)
            header = next(reader, [])
            names = _names(header, path)
            rows, lines, problems = _filled(reader, len(names), path)
    except UnicodeDecodeError as error:
        line = path.read_bytes()[: error.start].count(b"\n") + 1
        raise DataError(f"{path}, near line {line}: not UTF-8 ({error.reason}); save it as UTF-8") from None
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}; expected cells with quotes that close") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from None
    refuse(problems)
    cells = {name: [sys.intern(row[i]) for row in rows] for i, name in enumerate(names)}
    return RowFile(path=path, cells={name: list[object](column) for name, column in cells.items()}, lines=lines)


def _filled(reader: Iterator[list[str]], width: int, path: Path) -> tuple[list[list[str]], list[int], list[str]]:
    """The rows that hold something, the last line of each, and which of them have another number of cells."""
    rows, lines, problems = list[list[str]](), list[int](), list[str]()
    for row in reader:
        line = getattr(reader, "line_num", 0)
        if not any(cell.strip() for cell in row):
            continue
        rows.append(row)
        lines.append(line)
        if len(row) != width:
            problems.append(
                f"{path}, row {len(rows)} (line {line}): {len(row)} cells; expected {width}, as many as the header has"
            )
    return rows, lines, problems


def _delimiter(file: TextIO, path: Path) -> str:
    head = file.readline()
    while head.count('"') % 2 and len(head) < MOST_CELL and (more := file.readline()):  # a name of several lines
        head += more
    file.seek(0)
    if not head.strip():
        raise DataError(f"{path}, line 1: empty; expected the names of the columns")
    if path.suffix.lower() == ".tsv":
        return "\t"
    outside = "".join(head.split('"')[::2])
    counts = {one: outside.count(one) for one in DELIMITERS}
    return max(DELIMITERS, key=lambda one: counts[one])


def _names(header: Sequence[str], path: Path) -> list[str]:
    names = [name.strip() for name in header]
    if twice := [name for name, num in Counter(names).items() if num > 1]:
        raise DataError(f"{path}, line 1: the column {twice[0]!r} is there twice; give each a name of its own")
    return names


def _json_lines(path: Path) -> RowFile:
    rows, lines, problems = list[dict[str, object]](), list[int](), list[str]()
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                row, problem = None, f"not JSON ({error})"
            else:
                problem = f"a {type(row).__name__}"
            if not isinstance(row, dict):
                problems.append(f"{path}, row {len(rows) + 1} (line {number}): {problem}; expected one JSON object")
                row = {}
            rows.append(row)
            lines.append(number)
    refuse(problems)
    names = dict.fromkeys(name for row in rows for name in row)
    return RowFile(path=path, cells={name: [row.get(name) for row in rows] for name in names}, lines=lines)


def _parquet(path: Path) -> RowFile:
    try:
        from pyarrow import parquet
    except ImportError:
        raise InputError(
            f"{path} needs pyarrow, which is not installed: pip install 'trimtab[arrow]'. CSV and JSON lines are "
            "read without it"
        ) from None
    try:
        table = parquet.read_table(path)
    except Exception as error:  # whatever pyarrow raises of a file that is none of its own
        raise DataError(f"{path} cannot be read as Parquet: {' '.join(str(error).split())[:200]}") from None
    return RowFile(path=path, cells=table.to_pydict(), lines=[0] * table.num_rows)


def parts_of(rows: RowFile, column: str) -> list[str]:
    """Which part each row belongs to, by a column of `train`, `val` and `test`; DataError for other words.

    Example:
        >>> rows = RowFile(path=Path("a.csv"), cells={"split": ["train", "Valid"]}, lines=[2, 3])
        >>> parts_of(rows, "split")
        ['train', 'val']
    """
    words = [str(cell).strip().lower() for cell in rows.column(column, "the column of the split")]
    refuse(
        f"{rows.where(i, column)}: {word!r}; expected train, val or test"
        for i, word in enumerate(words)
        if word not in PARTS
    )
    return [PARTS[word] for word in words]


def named_like_a_split(rows: RowFile) -> str | None:
    """A column `split` (or `set`, `subset`, `fold`) that holds parts, if there is one."""
    for name in rows.columns:
        if name.lower() in ("split", "set", "subset", "fold") and _all_parts(rows.cells[name]):
            return name
    return None


def _all_parts(cells: Iterable[object]) -> bool:
    words = {str(cell).strip().lower() for cell in cells}
    known = [word for word in words if word in PARTS]
    return bool(known) and 2 * len(known) >= len(words)
