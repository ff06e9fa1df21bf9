"""Reads settings from plain data. A reader takes (value, name) and returns the checked value or raises.

pydantic is not used. It would replace the small readers here, but not the spellings (`a-b`, words between commas), the
presets, the options of rules or the one-line messages with "did you mean": each of its errors would need a translation.
It would also be a further compiled dependency, and its import alone takes 0.17 s; that of trimtab takes 0.03 s.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trimtab.core.errors import ConfigError
from trimtab.core.printable import brief
from trimtab.core.severity import Severity
from trimtab.core.suggest_name import did_you_mean

Reader = Callable[[object, str], object]


def read_table(settings: object, readers: Mapping[str, Reader], *, where: str) -> dict[str, Any]:
    """A table of settings, each read by its reader; an unknown key is an error with a suggestion."""
    if not isinstance(settings, Mapping):
        raise bad(where or "the settings", settings, "a table of settings")
    out = {}
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        label = f"{where}.{key}" if where else str(key)
        if name not in readers:
            listed = f"known are {', '.join(sorted(readers))}."
            hint = did_you_mean(name, readers, otherwise=listed, cutoff=0.5)
            raise ConfigError(f"unknown setting {label!r}; {hint}")
        out[name] = readers[name](value, label)
    return out


def bad(name: str, value: object, expected: str) -> ConfigError:
    """The error of a value that cannot be used."""
    return ConfigError(f"{name} = {shown(value)}; expected {expected}")


def shown(value: object) -> str:
    """A value as Python writes it, on one line and not too long."""
    try:
        return brief(repr(value))
    except Exception:  # a number of thousands of digits, an object that cannot be shown
        return f"a {type(value).__name__} that cannot be shown"


def meant(value: object, choices: Iterable[str]) -> str:
    """A hint at the choice that a value resembles; empty if there is none."""
    hint = did_you_mean(value, choices, otherwise="") if isinstance(value, str) else ""
    return f" ({hint})" if hint else ""


def boolean(value: object, name: str) -> bool:
    """True or false; 0 and 1 are refused."""
    if not isinstance(value, bool):
        raise bad(name, value, "true or false")
    return value


def integer(low: int) -> Reader:
    """A reader of whole numbers from `low` on."""

    def read(value: object, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise bad(name, value, f"a whole number of at least {low}")
        return value

    return read


def number(value: object) -> float | None:
    """The value as a float if it is a finite number, else None; booleans and texts are not numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def positive(value: object, name: str) -> float:
    """A finite number above 0."""
    found = number(value)
    if found is None or found <= 0:
        raise bad(name, value, "a finite number above 0")
    return found


def between(low: float, high: float) -> Reader:
    """A reader of numbers from `low` to `high`, both included."""

    def read(value: object, name: str) -> float:
        found = number(value)
        if found is None or not low <= found <= high:
            raise bad(name, value, f"a number from {low:g} to {high:g}")
        return found

    return read


def maybe(read: Reader) -> Reader:
    """The same reader, with None allowed."""
    return lambda value, name: None if value is None else read(value, name)


def choice(choices: tuple[str, ...]) -> Reader:
    """A reader of one of a few words."""

    def read(value: object, name: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise bad(name, value, f"one of {', '.join(choices)}{meant(value, choices)}")
        return str(value)

    return read


def text(value: object, name: str) -> str:
    """A text or a path."""
    if not isinstance(value, str | os.PathLike):
        raise bad(name, value, "a text")
    return str(value)


def words(value: object, name: str) -> tuple[str, ...]:
    """A list of words, or a text of words between commas or blanks."""
    if isinstance(value, str):
        value = [w for w in value.replace(",", " ").split() if w]
    if not isinstance(value, list | tuple | set | frozenset) or not all(isinstance(w, str) for w in value):
        raise bad(name, value, "a list of rule codes or names")
    return tuple(value)


def severities(value: object, name: str) -> dict[str, str]:
    """Severities by rule."""
    if not isinstance(value, Mapping):
        raise bad(name, value, 'a table such as {"GRAD002" = "warn"}')
    return {str(k): severity(v, f"{name}.{k}").name.lower() for k, v in value.items()}


def severity(value: object, name: str) -> Severity:
    """One of the three severities, by its name or its number."""
    names = [one.name.lower() for one in Severity]
    if isinstance(value, str | int) and not isinstance(value, bool):
        try:
            return Severity.parse(value)
        except ValueError:
            pass
    hint = meant(value, names)
    raise ConfigError(f"{name}: severity {shown(value)} is none of {', '.join(names)}; expected one of them{hint}")


def tables(value: object, name: str) -> dict[str, dict[str, object]]:
    """A table of tables."""
    if not isinstance(value, Mapping) or not all(isinstance(v, Mapping) for v in value.values()):
        raise bad(name, value, 'a table of tables such as {"exploding-gradient" = {ratio = 20}}')
    return {str(k): {str(key): one for key, one in v.items()} for k, v in value.items()}
