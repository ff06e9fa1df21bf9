"""Real tables with the scales they were measured in: nothing is centred, scaled or filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.core.errors import InputError
from trimtab.data.arrays import read_arrays

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TABLES = ("diabetes", "breast-cancer", "randhie")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One table: `x` `[rows, columns]` and `y` `[rows]`, with the names that belong to them.

    `y` holds numbers to predict (float32) where `classes` is empty, and otherwise the index of a class (uint8).
    """

    name: str
    x: NDArray[np.float32]
    y: NDArray[np.float32] | NDArray[np.uint8]
    columns: tuple[str, ...]
    target: str
    classes: tuple[str, ...]


def load_table(name: str) -> Table:
    """One of `TABLES`, raw.

    - `diabetes`: 442 patients, 10 measurements; how far the disease had come a year later (25 to 346).
    - `breast-cancer`: 569 tumours, 30 measurements over five decades; malignant or benign.
    - `randhie`: 20,190 years of insured people, 9 facts about each; visits to a doctor in that year (0 to 77).
      Neighbouring rows are years of the same person or family: hold out a block of rows, not every tenth one, or the
      same people are on both sides.

    Raises InputError for any other name.

    Example:
        >>> table = load_table("diabetes")
        >>> table.x.shape, table.target, table.columns[:4]
        ((442, 10), 'progression', ('age', 'sex', 'bmi', 'bp'))
        >>> load_table("breast-cancer").classes
        ('malignant', 'benign')
    """
    if name not in TABLES:
        raise InputError(f"there is no table {name!r}: expected one of {', '.join(TABLES)}. Choose one of these.")
    arrays = read_arrays("tables")
    return Table(
        name=name,
        x=arrays[f"{name}.x"],
        y=arrays[f"{name}.y"],
        columns=tuple(arrays[f"{name}.columns"].tolist()),
        target=str(arrays[f"{name}.target"]),
        classes=tuple(arrays[f"{name}.classes"].tolist()),
    )
