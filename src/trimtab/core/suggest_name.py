"""Names that people type: the one they probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def nearest_name(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """The known name that is most like a word; None where none is at least `cutoff` like it (1 is the same name).

    Example:
        >>> nearest_name("tabluar", ["charlm", "tabular"]), nearest_name("x", ["charlm", "tabular"])
        ('tabular', None)
        >>> nearest_name("GRAD01", ["GRAD010", "GRAD001"])  # zeros before a number are often left out
        'GRAD001'
    """
    known = list(known)
    same = [name for name in known if _without_zeros(name) == _without_zeros(word)]
    if same:
        return same[0]
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=cutoff)), None)


def _without_zeros(name: str) -> str:
    return re.sub(r"(?<!\d)0+(?=\d)", "", name)


def did_you_mean(word: str, known: Iterable[str], *, otherwise: str, cutoff: float = 0.6) -> str:
    """What to say after an unknown name: the nearest known one, or `otherwise` where none is near.

    Example:
        >>> did_you_mean("tabluar", ["charlm", "tabular"], otherwise="`trimtab train --help` lists them.")
        "did you mean 'tabular'?"
    """
    near = nearest_name(word, known, cutoff=cutoff)
    return otherwise if near is None else f"did you mean {near!r}?"


def instead_of(word: object, known: Iterable[str]) -> str:
    """What to say after an unknown name where there are few known ones: the nearest, and all of them.

    Example:
        >>> instead_of("tabluar", ["charlm", "tabular"])
        "did you mean 'tabular'? There are charlm, tabular"
        >>> instead_of("x", ["charlm", "tabular"])
        'expected one of charlm, tabular'
    """
    names = list(known)
    near = nearest_name(str(word), names)
    listed = ", ".join(names)
    return f"expected one of {listed}" if near is None else f"did you mean {near!r}? There are {listed}"
