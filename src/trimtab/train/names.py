"""Names that people type: the one they probably meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def instead_of(word: object, known: Iterable[str]) -> str:
    """What to say after an unknown name: the nearest one, if any is near, and all that there are.

    Example:
        >>> instead_of("tabluar", ["charlm", "tabular"])
        "did you mean 'tabular'? There are charlm, tabular"
        >>> instead_of("x", ["charlm", "tabular"])
        'expected one of charlm, tabular'
    """
    names = list(known)
    close = difflib.get_close_matches(str(word), names, n=1)
    return (
        f"did you mean {close[0]!r}? There are {', '.join(names)}" if close else f"expected one of {', '.join(names)}"
    )
