"""Which checks there are, and which of them are wanted."""

from __future__ import annotations

import difflib
import logging
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points

from trimtab.checks.outcome import Check
from trimtab.core.errors import ConfigError

log = logging.getLogger("trimtab")


@cache
def all_checks() -> tuple[Check, ...]:
    """Every known check: the built-in ones, then those of installed plug-ins (entry points `trimtab.checks`)."""
    found: list[Check] = [make() for make in import_module("trimtab.checks").BUILTIN]
    taken = {c.name for c in found}
    for point in entry_points(group="trimtab.checks"):
        try:
            check: Check = point.load()()
            if check.name in taken:
                raise ValueError(f"its name {check.name} is taken")
        except Exception as error:
            log.warning("check plug-in %s could not be loaded (%s): it is left out", point.value, error)
            continue
        taken.add(check.name)
        found.append(check)
    return tuple(found)


def find_check(code_or_name: str) -> Check | None:
    """The check with this code or name, in any case; None where there is none."""
    wanted = code_or_name.strip().lower().replace("_", "-")
    return next((c for c in all_checks() if wanted in (c.code.lower(), c.name)), None)


def select_checks(select: tuple[str, ...], ignore: tuple[str, ...]) -> tuple[Check, ...]:
    """Those that are selected (all, if nothing is) and not ignored, by code, family or name.

    Example:
        >>> [check.name for check in select_checks(("MODE",), ("no-grad",))]
        ['eval-mode']
    """
    for word in (*select, *ignore):
        if not any(_matches(word, c) for c in all_checks()):
            names = {n.lower(): n for c in all_checks() for n in (c.code, c.name, c.code.rstrip("0123456789"))}
            close = difflib.get_close_matches(word.lower().replace("_", "-"), names, n=1)
            hint = f"did you mean {names[close[0]]!r}?" if close else "`trimtab doctor --json` names them all."
            raise ConfigError(f"there is no check {word!r}; {hint}")
    return tuple(
        c
        for c in all_checks()
        if (not select or any(_matches(w, c) for w in select)) and not any(_matches(w, c) for w in ignore)
    )


def _matches(word: str, check: Check) -> bool:
    w = word.strip().upper().replace("_", "-")
    return w == "ALL" or w in (check.code, check.name.upper(), check.code.rstrip("0123456789"))
