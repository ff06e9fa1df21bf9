"""Reads the shipped data sets: digits, emoji with their names, textures and raw tables. No file holds a pickle."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray


def read_arrays(name: str) -> dict[str, NDArray[Any]]:
    """Every array of the shipped file `name`.npz, by its key.

    Example:
        >>> sorted(read_arrays("digits"))
        ['x', 'y']
    """
    import numpy as np

    with (
        files("trimtab.data").joinpath(f"{name}.npz").open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return {key: arrays[key] for key in arrays.files}


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """1,797 handwritten digits: images `[1797, 64]` with values 0 to 16, and their classes `[1797]`.

    Example:
        >>> x, y = load_digits()
        >>> x.shape, int(x.max()), int(y[0])
        ((1797, 64), 16, 0)
    """
    arrays = read_arrays("digits")
    return arrays["x"], arrays["y"]


LANGUAGES = ("en", "es", "fr", "de", "it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Emoji:
    """Aligned views: row i of every field is the same emoji.

    `images` is `[n, 24, 24, 3]` on a white ground, `characters` holds the emoji as text, `names[language][i]` its name,
    and `held_out` is true for the 15 % that no training may see (chosen by a hash of the emoji, so that the choice
    survives a new release of the font or the names).
    """

    images: NDArray[np.uint8]
    characters: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]
    held_out: NDArray[np.bool_]


def load_emoji() -> Emoji:
    """The base emoji (no skin tones) that look different from one another at 24 pixels, with names in five languages.

    Example:
        >>> emoji = load_emoji()
        >>> i = emoji.characters.index("🌺")
        >>> [emoji.names[language][i] for language in LANGUAGES]
        ['hibiscus', 'flor de hibisco', 'hibiscus', 'hibiskus', 'ibisco']
        >>> emoji.images.shape[1:], emoji.images.dtype.name
        ((24, 24, 3), 'uint8')
    """
    arrays = read_arrays("emoji")
    # One line per emoji, tabs between it and its names: bytes, since a unicode array pads every name to the longest.
    rows = [line.split("\t") for line in arrays["text"].tobytes().decode("utf-8").split("\n")]
    characters, *names = (tuple(column) for column in zip(*rows, strict=True))
    return Emoji(
        images=arrays["images"],
        characters=characters,
        names=dict(zip(LANGUAGES, names, strict=True)),
        held_out=arrays["held_out"],
    )


def load_textures() -> dict[str, NDArray[np.uint8]]:
    """Nine square pictures by name: grey ones `[side, side]`, coloured ones `[side, side, 3]`.

    `brick`, `grass` and `gravel` are even textures of 384 pixels; `camera`, `chelsea`, `coffee`, `hubble`, `retina` and
    `rocket` are photographs of 192.

    Example:
        >>> textures = load_textures()
        >>> sorted(textures)
        ['brick', 'camera', 'chelsea', 'coffee', 'grass', 'gravel', 'hubble', 'retina', 'rocket']
        >>> textures["brick"].shape, textures["coffee"].shape
        ((384, 384), (192, 192, 3))
    """
    return read_arrays("textures")


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
