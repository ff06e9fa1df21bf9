"""Emoji: one small picture and its name in five languages, six aligned views of the same thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab.data.arrays import read_arrays

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

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
