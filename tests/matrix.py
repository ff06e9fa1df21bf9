"""Matrices of cases: a sample that you name runs each time, the rest with `pytest -m long`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

FULL = (pytest.mark.full,)
"""For sweeps over everything, of which CI runs every so-manieth."""


def sampled(
    cases: Mapping[str, Any] | Iterable[str],
    usual: str | Collection[str],
    marks: Any = None,
    *,
    named: Any = (),
    others: Any = (pytest.mark.long,),
) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: those named in `usual` as they are, all others marked as long.

    `cases` maps names to parameters; an iterable of names serves as both. `usual` holds names, as a collection or with
    spaces between them. `marks` gives further marks for a name. Those in `usual` get the marks `named`, all others
    `others`.
    """
    found = cases if isinstance(cases, Mapping) else {case: case for case in cases}
    chosen = set(usual.split() if isinstance(usual, str) else usual)
    unknown = sorted(chosen - set(found))
    if unknown:
        raise ValueError(f"the sample names cases that do not exist: {', '.join(unknown)}")
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=name,
            marks=[*(marks(name) if marks else ()), *(named if name in chosen else others)],
        )
        for name, case in found.items()
    ]


def in_ci(cases: Mapping[str, Any] | Iterable[str], usual: str | Collection[str]) -> list[Any]:
    """The same for long cases: CI runs those named, `pytest -m full` all others."""
    return sampled(cases, usual, named=(pytest.mark.long,), others=(pytest.mark.full,))
