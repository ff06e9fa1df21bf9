"""A claim: what must hold of numbers that were measured, and whether it does."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Number = float | int | bool | str
Test = Callable[[Any], bool]
NOT_RUN = "not run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One expectation: its values by seed (or under one name), the bound in words, and the test; None: only told."""

    what: str
    bound: str = ""
    values: Mapping[str, Number]
    test: Test | None = None

    @property
    def holds(self) -> bool:
        """Whether every value passes; one that was not measured does not."""
        return self.test is None or all(value != NOT_RUN and self.test(value) for value in self.values.values())

    @property
    def verdict(self) -> str:
        """`ok`, `MISS`, or a dash where nothing was promised."""
        return "–" if self.test is None else "ok" if self.holds else "MISS"

    def line(self, recipe: str) -> str:
        """One line for the terminal."""
        shown = ", ".join(f"{told(value)} ({name})" for name, value in self.values.items())
        return f"{self.verdict:<5} {recipe}: {self.what}: {shown}" + (f"; expected {self.bound}" if self.bound else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table below the claims."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What a section of the page says."""

    title: str
    about: str
    claims: Sequence[Claim]
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()
    summary: Sequence[Sequence[str]] = ()
    """Rows of the short table: what is measured, clean, what goes wrong, guarded, unguarded."""


class Found:
    """What was measured in a section, by the name of the job; what is missing is said to be not run."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, *path: str | int, default: Any = NOT_RUN) -> Any:
        """A value by its path: the job, then keys within."""
        here: Any = self._values
        for key in path:
            try:
                here = here[key]
            except (KeyError, IndexError, TypeError):
                return default
        return here

    def count(self, *path: str | int) -> int | str:
        """How many there are in a list."""
        here = self.get(*path)
        return NOT_RUN if here == NOT_RUN else len(here)


def told(value: Any) -> str:
    """A value for people."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"


def span(values: Iterable[Any]) -> str:
    """From the lowest to the highest; NaN if one is."""
    seen = list(values)
    if not seen or NOT_RUN in seen:
        return NOT_RUN
    low, high = (told(float(one)) for one in (min(seen), max(seen)))
    return "NaN" if any(math.isnan(one) for one in seen) else low if low == high else f"{low} to {high}"


def at_least(bound: float) -> tuple[str, Test]:
    return f"at least {bound:g}", lambda value: value >= bound


def above(bound: float) -> tuple[str, Test]:
    return f"above {bound:g}", lambda value: value > bound


def below(bound: float) -> tuple[str, Test]:
    return f"below {bound:g}", lambda value: value < bound


def within(low: float, high: float) -> tuple[str, Test]:
    return f"{low:g} to {high:g}", lambda value: low <= value <= high


def equal(wanted: Number) -> tuple[str, Test]:
    return told(wanted), lambda value: value == wanted


def claim(what: str, values: Mapping[str, Any], bound: tuple[str, Test] | None = None) -> Claim:
    """A claim from a bound made by one of the functions above."""
    text, test = bound or ("", None)
    return Claim(what=what, bound=text, values=dict(values), test=test)


def by_seed(seeds: Iterable[int], value: Callable[[int], Any]) -> dict[str, Any]:
    """A value of every seed, under its name."""
    return {str(seed): value(seed) for seed in seeds}
