"""A user's own table, ready to train on: read, split, its columns recognised, every cell that does not fit named.

It is one file with a column of parts (`split`: train, val, test) or without (a fifth is then held out by the seed), or
a folder with `train.csv` and `val.csv` or `test.csv` in it, or any of the other formats of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import instead_of
from trimtab.train.data_problems import refuse
from trimtab.train.own_data.row_files import (
    ENDINGS,
    PARTS,
    TEST,
    TRAIN,
    VAL,
    RowFile,
    named_like_a_split,
    parts_of,
    read_rows,
)
from trimtab.train.recipes.tabular.columns import Columns, learn_columns, learn_goal, problems

FEWEST = 10
NUM_LISTED = 8
Part = tuple[RowFile, list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTable:
    """Inputs and targets of each part (`train`, `val`, perhaps `test`), and lines about them for people."""

    columns: Columns
    parts: Mapping[str, tuple[Tensor, Tensor]]
    lines: tuple[str, ...]


def read_table(
    path: str,
    target: str | None,
    *,
    task: str = "auto",
    split: str | None = None,
    val_data: str | None = None,
    kinds: str = "",
    held_out: float,
    seed: int,
) -> OwnTable:
    """Read, split and encode a table; DataError with file and row for every cell that does not fit."""
    first, parts, said = _parts(Path(path), split, val_data, held_out, seed)
    if target is None:
        raise InputError(
            f"which column of {first.path} is to be predicted? Give --target COLUMN, one of {', '.join(first.columns)}"
        )
    rows, train = parts[TRAIN]
    if len(train) < FEWEST:
        raise InputError(f"{rows.path} has {len(train)} rows to train on; expected at least {FEWEST}")
    goal, line = learn_goal(rows, train, target, task)
    divided = split or named_like_a_split(first)
    columns = learn_columns(rows, train, goal, kinds=kinds_of(kinds), without=() if divided is None else (divided,))
    files = {id(one): one for one, _ in parts.values()}.values()
    refuse(problem for file in files for problem in problems(file, columns))
    sizes = ", ".join(f"{len(which)} {name}" for name, (_, which) in parts.items())
    made = {name: (columns.encode(one, which), columns.targets(one, which)) for name, (one, which) in parts.items()}
    lines = (f"{path}: {sizes} rows ({said})", line, *_about(columns))
    return OwnTable(columns=columns, parts=made, lines=lines)


def kinds_of(text: str) -> dict[str, str]:
    """`name=kind` with commas between them.

    Example:
        >>> kinds_of("zip=category, notes=text")
        {'zip': 'category', 'notes': 'text'}
    """
    found = {}
    for one in filter(None, (part.strip() for part in text.split(","))):
        name, equals, kind = one.rpartition("=")
        if not equals:
            raise InputError(f"kinds has {one!r}; expected COLUMN=KIND, for example zip=category")
        found[name.strip()] = kind.strip()
    return found


def _about(columns: Columns) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for column in columns.inputs:
        names.setdefault(column.kind, []).append(column.name)
    kinds = "; ".join(f"{kind}: {_listed(some)}" for kind, some in names.items())
    yield f"inputs: {len(columns.inputs)} columns become {columns.width} numbers a row ({kinds})"
    for name, why in columns.skipped.items():
        yield f"not used: {name}: {why}"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NUM_LISTED
    return ", ".join(names[:NUM_LISTED]) + (f" and {more} more" if more > 0 else "")


def _parts(
    path: Path, split: str | None, val_data: str | None, held_out: float, seed: int
) -> tuple[RowFile, dict[str, Part], str]:
    """The file of the training rows, the rows of each part, and where the parts come from."""
    if not path.exists():
        raise InputError(f"there is no table {str(path)!r}: {instead_of(path.name, _near(path))}")
    files = _files(path) if path.is_dir() else {TRAIN: path}
    if val_data is not None:
        files[VAL] = Path(val_data)
    rows = read_rows(files[TRAIN])
    found: dict[str, Part] = {TRAIN: (rows, list(range(len(rows))))}
    said = "files of their own" if len(files) > 1 else ""
    named = split or named_like_a_split(rows)
    if named is not None:
        where = parts_of(rows, named)
        found = {part: (rows, [i for i, one in enumerate(where) if one == part]) for part in (TRAIN, VAL, TEST)}
        found = {part: one for part, one in found.items() if one[1]}
        if TRAIN not in found:
            raise InputError(f"{rows.path}: no row of the column {named!r} says train; expected some")
        said = f"by the column {named}"
    for part, file in files.items():
        if part != TRAIN:
            other = read_rows(file)
            found[part] = (other, list(range(len(other))))
    if VAL not in found:
        train, val = _drawn(found[TRAIN][1], held_out, seed)
        found = {TRAIN: (rows, train), VAL: (rows, val)} | {k: v for k, v in found.items() if k == TEST}
        said = f"{held_out:.0%} held out by seed {seed}" + (f", test {said}" if said else "")
    return rows, found, said


def _drawn(rows: list[int], held_out: float, seed: int) -> tuple[list[int], list[int]]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    cut = max(round(len(rows) * held_out), 1)
    return sorted(rows[i] for i in order[cut:]), sorted(rows[i] for i in order[:cut])


def _files(folder: Path) -> dict[str, Path]:
    found = {}
    tables = [one for one in sorted(folder.iterdir()) if one.suffix.lower() in ENDINGS and one.name[0] != "."]
    for path in tables:
        if (part := PARTS.get(path.stem.lower())) is not None:
            found[part] = path
    if TRAIN not in found and len(tables) == 1:
        return {TRAIN: tables[0]}
    if TRAIN not in found:
        raise InputError(
            f"{folder} has no train.csv; expected one table in it, or train and val (or test), ending in "
            f"{', '.join(ENDINGS)}; found {', '.join(p.name for p in sorted(folder.iterdir())[:6]) or 'nothing'}"
        )
    return found


def _near(path: Path) -> list[str]:
    there = path.parent if path.parent.is_dir() else Path()
    return sorted(one.name for one in there.iterdir() if one.suffix.lower() in ENDINGS)[:20]
