"""The columns of a user's own table: which kind each is, and how its cells become numbers.

What is learnt from the training rows (means, spreads, categories, classes) is plain data, so that it can be stored with
a model (`Columns.to_json`) and applied to other rows.

| kind | becomes |
|---|---|
| number | its distance from the mean in standard deviations; a blank is the mean, and says so in a column of its own |
| date | days since the mean date, scaled, and its place in the year, the week and the day as angles |
| category | one column for each value; a value that training never saw is none of them |
| text | pieces of its words, hashed |
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import instead_of
from trimtab.train.own_data.row_files import RowFile, is_blank
from trimtab.train.text_features import PieceSums, hash_of, pieces

NUMBER, DATE, CATEGORY, TEXT, SKIP = KINDS = ("number", "date", "category", "text", "skip")
MOSTLY = 0.9
"""A column is of a kind if this share of its cells is; the others are mistakes and are named."""
MOST_CATEGORIES = 200
FEW_CATEGORIES = 20
CATEGORY_FRAC = 0.2
UNIQUE_FRAC = 0.95
TEXT_WIDTH = 64
NUM_AT_ONCE = 2_000
MOST_CLASSES = 10
ROWS_PER_CLASS = 10
DATE_FORMATS = ("%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%Y/%m/%d", "%d.%m.%Y %H:%M", "%m/%d/%Y %H:%M")
DAY = 86_400.0
IDENTIFIERS = ("id", "index", "uuid", "key", "unnamed: 0", "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column and what was learnt of it: `format` of its dates ("" is ISO), `decimal` of its numbers."""

    name: str
    kind: str
    mean: float = 0.0
    spread: float = 1.0
    blanks: bool = False
    values: tuple[str, ...] = ()
    format: str = ""
    decimal: str = "."

    @property
    def width(self) -> int:
        """How many numbers a cell becomes."""
        sizes = {NUMBER: 1, DATE: 7, CATEGORY: len(self.values), TEXT: TEXT_WIDTH, SKIP: 0}
        return sizes[self.kind] + int(self.blanks and self.kind in (NUMBER, DATE))


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What is predicted: numbers with their mean and spread, or one of `classes`."""

    name: str
    mean: float = 0.0
    spread: float = 1.0
    classes: tuple[str, ...] = ()
    numeric: bool = True
    decimal: str = "."

    def number(self, cell: object) -> float | None:
        """The number in a cell; None if there is none."""
        return as_number(cell, self.decimal)

    def is_blank(self, cell: object) -> bool:
        """Whether a cell says nothing; `none` may be the name of a class."""
        return is_blank(cell, among_words=not self.numeric)

    def label(self, cell: object) -> str:
        """The class of a cell, spelt in one way: 1 and 1.0 are the same."""
        value = self.number(cell) if self.numeric else None
        if value is None:
            return str(cell).strip()
        return str(int(value)) if value.is_integer() else repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """All columns that are used, and the goal."""

    inputs: tuple[Column, ...]
    goal: Goal
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Columns that are not used, and why."""

    @property
    def width(self) -> int:
        """How many numbers a row becomes."""
        return sum(column.width for column in self.inputs)

    def encode(self, rows: RowFile, which: Sequence[int]) -> Tensor:
        """Some rows as numbers `[rows, width]`; InputError if a column is missing."""
        parts = [_encoded(column, [rows.column(column.name, "an input")[i] for i in which]) for column in self.inputs]
        return torch.cat(parts, dim=1)

    def targets(self, rows: RowFile, which: Sequence[int]) -> Tensor:
        """What is to be predicted for some rows: scaled numbers `[rows, 1]`, or the numbers of classes `[rows]`."""
        cells = [rows.cells[self.goal.name][i] for i in which]
        if self.goal.classes:
            number = {name: i for i, name in enumerate(self.goal.classes)}
            return torch.tensor([number[self.goal.label(cell)] for cell in cells])
        values = torch.tensor([self.goal.number(cell) or 0.0 for cell in cells], dtype=torch.float64)
        return ((values - self.goal.mean) / self.goal.spread).float().reshape(-1, 1)

    def to_json(self) -> str:
        """Everything as text; `from_json` reads it.

        Example:
            >>> columns = Columns(inputs=(Column(name="age", kind="number"),), goal=Goal(name="price"))
            >>> Columns.from_json(columns.to_json()) == columns
            True
        """
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> Columns:
        """What `to_json` wrote."""
        given: dict[str, Any] = json.loads(text)
        inputs = tuple(Column(**{**one, "values": tuple(one["values"])}) for one in given["inputs"])
        goal = Goal(**{**given["goal"], "classes": tuple(given["goal"]["classes"])})
        return cls(inputs=inputs, goal=goal, skipped=given["skipped"])


# -- cells -----------------------------------------------------------------------------------------------------------


def as_number(cell: object, decimal: str = ".") -> float | None:
    """The number in a cell, which may have separators between groups of three digits; None if there is none.

    Example:
        >>> [as_number(cell) for cell in ("1,204.5", " 7 ", "seven", True)]
        [1204.5, 7.0, None, None]
        >>> as_number("1.204,5", ",")
        1204.5
    """
    if isinstance(cell, bool | list | dict):
        return None
    text = _with_point(cell, decimal) if isinstance(cell, str) else cell
    try:
        return float(text)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    except OverflowError:  # an integer that no float can hold
        return math.inf


def _with_point(text: str, decimal: str) -> str:
    """A number as Python writes it: no separators between groups, a point before fractions."""
    if "," not in text and (decimal == "." or "." not in text):
        return text if "_" not in text else ""  # which float() takes for a separator
    if decimal == ",":
        whole, comma, rest = text.strip().partition(",")
        return f"{whole.replace('.', '') if _grouped(whole, '.') else whole}{'.' if comma else ''}{rest}"
    return text.strip().replace(",", "") if _grouped(text, ",") else text


def _grouped(text: str, separator: str) -> bool:
    """Whether separators stand between groups of three digits, and nowhere else."""
    whole = text.strip().lstrip("+-").partition("." if separator == "," else ",")[0]
    first, *others = whole.split(separator)
    return bool(others) and 1 <= len(first) <= 3 and all(len(one) == 3 and one.isdigit() for one in others)


def decimal_of(cells: Sequence[object]) -> str:
    """What separates the fractions of a column: a comma if there are fractions that only a comma can separate.

    Example:
        >>> decimal_of(["3,5", "1.204,25"]), decimal_of(["3.5", "1,204"])
        (',', '.')
    """
    texts = [cell for cell in cells if isinstance(cell, str) and ("," in cell or "." in cell)]
    if not any("," in text for text in texts):
        return "."
    commas = sum(as_number(text) is None and as_number(text, ",") is not None for text in texts)
    points = sum(as_number(text) is not None and as_number(text, ",") is None for text in texts)
    return "," if commas > points else "."


def as_date(cell: object, format_: str = "") -> datetime | None:
    """The date in a cell, by a format or in ISO's; None if there is none.

    Example:
        >>> as_date("2024-05-01").isoformat(), as_date("1.5.2024", "%d.%m.%Y").month
        ('2024-05-01T00:00:00+00:00', 5)
    """
    if isinstance(cell, datetime | date):
        found = cell if isinstance(cell, datetime) else datetime(cell.year, cell.month, cell.day)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    if not isinstance(cell, str) or len(cell.strip()) < 6:
        return None
    try:
        found = datetime.strptime(cell.strip(), format_) if format_ else datetime.fromisoformat(cell.strip())
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _encoded(column: Column, cells: Sequence[object]) -> Tensor:
    there = [None if is_blank(cell) else cell for cell in cells]
    if column.kind == NUMBER:
        numbers = [None if c is None else as_number(c, column.decimal) for c in there]
        rows = [[0.0 if c is None else (c - column.mean) / column.spread] for c in numbers]
    elif column.kind == DATE:
        rows = [_angles(as_date(c, column.format), column) for c in there]
    elif column.kind == CATEGORY:
        number = {value: i for i, value in enumerate(column.values)}
        found = torch.zeros(len(cells), len(column.values))
        for i, cell in enumerate(cells):
            if (at := number.get(_category(cell))) is not None:
                found[i, at] = 1.0
        return found
    else:
        return _text_rows(["" if is_blank(cell, among_words=True) else str(cell) for cell in cells])
    if column.blanks:
        rows = [[*row, float(c is None)] for row, c in zip(rows, there, strict=True)]
    return torch.tensor(rows, dtype=torch.float32)


def _text_rows(texts: Sequence[str]) -> Tensor:
    """Some at a time: the pieces of a text take far more room than its row."""
    sums, found = PieceSums(TEXT_WIDTH), []
    for first in range(0, len(texts), NUM_AT_ONCE):
        some = texts[first : first + NUM_AT_ONCE]
        found.append(sums.rows([[hash_of(piece) for piece in pieces(text)] for text in some]))
    return torch.cat(found) if found else torch.zeros(0, TEXT_WIDTH)


def _angles(moment: datetime | None, column: Column) -> list[float]:
    if moment is None:
        return [0.0] * 7
    parts = (moment.timetuple().tm_yday / 366.0, moment.weekday() / 7.0, (moment.hour * 60 + moment.minute) / 1440.0)
    turns = [f(2.0 * math.pi * part) for part in parts for f in (math.sin, math.cos)]
    return [(moment.timestamp() / DAY - column.mean) / column.spread, *turns]


def _category(cell: object) -> str:
    return "(blank)" if is_blank(cell, among_words=True) else str(cell).strip()


# -- what a column is ------------------------------------------------------------------------------------------------


def learn_columns(
    rows: RowFile, train: Sequence[int], goal: Goal, *, kinds: Mapping[str, str], without: Sequence[str] = ()
) -> Columns:
    """The kind of every column, by the training rows alone; `kinds` are those that were given."""
    for name, kind in kinds.items():
        rows.column(name, "named in kinds")
        if kind not in KINDS:
            raise InputError(f"kinds: {name!r} is {kind!r}; {instead_of(kind, KINDS)}")
    inputs, skipped = list[Column](), dict[str, str]()
    for name in rows.columns:
        if name == goal.name or name in without:
            continue
        column, why = _learnt(name, [rows.cells[name][i] for i in train], kinds.get(name))
        if why:
            skipped[name] = why
        else:
            inputs.append(column)
    if not inputs:
        raise InputError(
            f"{rows.path} has no column to learn from beside {goal.name!r}; "
            f"{'; '.join(f'{name}: {why}' for name, why in skipped.items()) or 'add one'}"
        )
    return Columns(inputs=tuple(inputs), goal=goal, skipped=skipped)


def _learnt(name: str, cells: Sequence[object], kind: str | None) -> tuple[Column, str]:
    """A column as its cells are, and why it cannot be used ("" if it can)."""
    there = [cell for cell in cells if not is_blank(cell)]
    unused = Column(name=name, kind=SKIP)
    if kind == SKIP:
        return unused, "as you asked"
    if not there:
        return unused, "every cell is blank"
    kind = kind or _kind(name, there)
    if kind == SKIP:
        return unused, f"each of its {len(there)} values is different, like an identifier (--kinds {name}=text uses it)"
    blanks = len(there) < len(cells)
    if kind == NUMBER:
        decimal = decimal_of(there)
        numbers = [v for cell in there if (v := as_number(cell, decimal)) is not None and math.isfinite(v)]
        if not numbers:
            return unused, "no value is a finite number"
        mean, spread = _moments(numbers)
        column = Column(name=name, kind=kind, mean=mean, spread=spread, blanks=blanks, decimal=decimal)
        return column, "" if spread > 0 else f"every value is {mean:g}"
    if kind == DATE:
        format_ = _date_format(there)
        moments = [m.timestamp() / DAY for cell in there if (m := as_date(cell, format_)) is not None]
        mean, spread = _moments(moments)
        return Column(name=name, kind=kind, mean=mean, spread=spread or 1.0, blanks=blanks, format=format_), ""
    if kind == CATEGORY:
        counts = Counter(_category(cell) for cell in cells)
        values = tuple(sorted(value for value, _ in counts.most_common(MOST_CATEGORIES)))
        return Column(name=name, kind=kind, values=values), "" if len(values) > 1 else f"every value is {values[0]!r}"
    return Column(name=name, kind=TEXT), ""


def _kind(name: str, there: Sequence[object]) -> str:
    num = len(there)
    different = len({str(cell) for cell in there})
    decimal = decimal_of(there)
    if sum(as_number(cell, decimal) is not None for cell in there) >= MOSTLY * num:
        counted = all((v := as_number(cell)) is not None and v == int(v) for cell in there if _finite(cell))
        return SKIP if name.strip().lower() in IDENTIFIERS and counted and different == num else NUMBER
    format_ = _date_format(there)
    if sum(as_date(cell, format_) is not None for cell in there) >= MOSTLY * num:
        return DATE
    if different <= min(max(FEW_CATEGORIES, CATEGORY_FRAC * num), MOST_CATEGORIES) and different <= max(num / 2, 2):
        return CATEGORY
    words = sum(len(str(cell).split()) for cell in there) / num
    return SKIP if different >= UNIQUE_FRAC * num and words < 1.5 else TEXT


def _finite(cell: object, decimal: str = ".") -> bool:
    value = as_number(cell, decimal)
    return value is not None and math.isfinite(value)


def _date_format(there: Sequence[object]) -> str:
    """The format that most cells have; ISO's is the first."""
    some = there[:200]
    return max(("", *DATE_FORMATS), key=lambda one: sum(as_date(cell, one) is not None for cell in some))


def _moments(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; values that differ by rounding alone have none."""
    if not values:
        return 0.0, 0.0
    if (largest := max(abs(value) for value in values)) > 1e100:  # whose square no float can hold
        mean, spread = _moments([value / largest for value in values])
        return mean * largest, spread * largest
    mean = math.fsum(values) / len(values)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1))
    return mean, spread if spread > 1e-12 * max(abs(mean), 1e-300) else 0.0


# -- the goal --------------------------------------------------------------------------------------------------------


def learn_goal(rows: RowFile, train: Sequence[int], name: str, task: str) -> tuple[Goal, str]:
    """What is predicted, and a line that says so and why."""
    given = [rows.column(name, "the target")[i] for i in train]
    cells = [cell for cell in given if not is_blank(cell)]
    decimal = decimal_of(cells)
    numbers = [v for cell in cells if (v := as_number(cell, decimal)) is not None]
    numeric = bool(cells) and len(numbers) >= MOSTLY * len(cells)
    plain = Goal(name=name, numeric=numeric, decimal=decimal)
    cells = [cell for cell in given if not plain.is_blank(cell)]
    if not cells:
        raise InputError(f"{rows.path}: the target {name!r} is blank in every training row; expected values to learn")
    different = len({plain.label(cell) for cell in cells})
    if task == "auto":
        few = different <= 2 or (
            all(v.is_integer() for v in numbers) and different <= min(MOST_CLASSES, len(cells) / ROWS_PER_CLASS)
        )
        chosen = "classification" if not numeric or few else "regression"
    else:
        chosen = task
    other = "regression" if chosen == "classification" else "classification"
    how = f"--task {other} changes that" if numeric and task == "auto" else "as you asked" if task != "auto" else "text"
    if chosen == "regression":
        return _numbers_goal(rows, plain, numbers), (
            f"target {name}: {different} different numbers from {min(numbers, default=0.0):g} to "
            f"{max(numbers, default=0.0):g}: regression ({how})"
        )
    if different < 2 or different > max(len(cells) / 2, 2):
        raise InputError(
            f"{rows.path}: the target {name!r} has {different} different values in {len(cells)} training rows; "
            "expected at least 2 classes with several rows each, or numbers (--task regression)"
        )
    counts = Counter(plain.label(cell) for cell in cells)
    classes = tuple(sorted(counts, key=lambda one: (float(one), one) if numeric and _finite(one) else (0.0, one)))
    shown = ", ".join(f"{one} ({counts[one]})" for one in classes[:6]) + (", ..." if different > 6 else "")
    line = f"target {name}: {different} classes, {shown}: classification ({how})"
    return replace(plain, classes=classes), line


def _numbers_goal(rows: RowFile, plain: Goal, numbers: Sequence[float]) -> Goal:
    name = plain.name
    if not plain.numeric:
        raise InputError(
            f"{rows.path}: only {len(numbers)} cells of the target {name!r} are numbers; expected numbers for "
            "regression, or --task classification"
        )
    mean, spread = _moments([value for value in numbers if math.isfinite(value)])
    if not spread > 0:
        raise InputError(
            f"{rows.path}: the target {name!r} is {mean:g} in every training row; there is nothing to learn"
        )
    return replace(plain, mean=mean, spread=spread)


# -- problems --------------------------------------------------------------------------------------------------------


def problems(rows: RowFile, columns: Columns) -> Iterator[str]:
    """Every cell that does not fit its column, with its row: in any part of the data."""
    for column in columns.inputs:
        kind = {NUMBER: "a number", DATE: "a date"}.get(column.kind)
        if kind is None:
            continue
        for i, cell in enumerate(rows.column(column.name, "an input")):
            if is_blank(cell):
                continue
            fits = _finite(cell, column.decimal) if column.kind == NUMBER else as_date(cell, column.format) is not None
            if not fits:
                yield f"{rows.where(i, column.name)}: {str(cell)[:60]!r}; expected {kind} or a blank, as in other rows"
    goal = columns.goal
    for i, cell in enumerate(rows.column(goal.name, "the target")):
        if goal.is_blank(cell):
            yield f"{rows.where(i, goal.name)}: no target; fill it in, or remove the row"
        elif not goal.classes and not _finite(cell, goal.decimal):
            yield f"{rows.where(i, goal.name)}: {str(cell)[:60]!r}; expected a number, which is the target"
        elif goal.classes and goal.label(cell) not in goal.classes:
            seen = ", ".join(goal.classes[:8])
            yield (
                f"{rows.where(i, goal.name)}: the label {goal.label(cell)[:60]!r} never occurs in training, which has "
                f"{seen}{', ...' if len(goal.classes) > 8 else ''}; correct it, or move rows of it to training"
            )
