"""Which rules there are, and which of them a configuration wants, at which severity."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from trimtab.core.config import Config
from trimtab.core.errors import ConfigError
from trimtab.core.types import Rule, Severity

log = logging.getLogger("trimtab")


@cache
def all_rules() -> tuple[type[Rule], ...]:
    """Every known rule: the built-in ones, then those of installed plug-ins (entry points `trimtab.rules`)."""
    # Loaded by name: the registry is in the core, below the rules it serves.
    found: list[type[Rule]] = list(import_module("trimtab.rules").BUILTIN)
    taken = {r.code for r in found}
    for point in entry_points(group="trimtab.rules"):
        try:
            rule: type[Rule] = point.load()
            if rule.code in taken:
                raise ValueError(f"its code {rule.code} is taken")
        except Exception as error:
            log.warning("rule plug-in %s could not be loaded (%s): it is left out", point.value, error)
            continue
        taken.add(rule.code)
        found.append(rule)
    return tuple(found)


def find_rule(code_or_name: str) -> type[Rule]:
    """The rule with this code (`GRAD001`) or name (`nonfinite-gradient`), in any case."""
    wanted = code_or_name.strip().lower().replace("_", "-")
    for rule in all_rules():
        if wanted in (rule.code.lower(), rule.name):
            return rule
    raise ConfigError(_unknown(code_or_name))


def select_rules(config: Config) -> tuple[Rule, ...]:
    """The rules a configuration selects, with its thresholds and severities."""
    for word in (*config.select, *config.ignore, *config.severity, *config.rules):
        if not any(_matches(word, r) for r in all_rules()):
            raise ConfigError(_unknown(word))
    return tuple(
        _build(rule, config) for rule in all_rules() if _any(config.select, rule) and not _any(config.ignore, rule)
    )


def advice_of(rule: Rule | type[Rule]) -> tuple[str, ...]:
    """The numbered recommendations under "What to try" in a rule's documentation, in their order."""
    return _advice_in(rule.__doc__ or "")


@cache
def _advice_in(documentation: str) -> tuple[str, ...]:
    _, _, tail = documentation.partition("## What to try")
    section = re.split(r"^\s*## ", tail, maxsplit=1, flags=re.MULTILINE)[0]
    items = re.split(r"^\s*\d+\.\s+", section, flags=re.MULTILINE)[1:]
    return tuple(" ".join(item.split()) for item in items)


def _build(rule: type[Rule], config: Config) -> Rule:
    settings: dict[str, Any] = {}
    for word, values in config.rules.items():
        if _matches(word, rule):
            settings |= values
    for word, severity in config.severity.items():
        if _matches(word, rule):
            settings["severity"] = Severity.parse(severity)
    known: set[str] = {f.name for f in fields(rule)} if is_dataclass(rule) else set()
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"it has {', '.join(sorted(known))}."
            raise ConfigError(f"rule {rule.code} ({rule.name}) has no setting {key!r}; {hint}")
    return rule(**settings)


def _any(words: Iterable[str], rule: type[Rule]) -> bool:
    return any(_matches(w, rule) for w in words)


def _matches(word: str, rule: type[Rule]) -> bool:
    """`ALL`, a code, a family (`GRAD`), or a name."""
    w = word.strip().upper().replace("_", "-")
    return w == "ALL" or w in (rule.code, rule.name.upper(), rule.code.rstrip("0123456789"))


def _unknown(word: str) -> str:
    names = {n.lower(): n for r in all_rules() for n in (r.code, r.name, r.code.rstrip("0123456789"))}
    close = [names[n] for n in difflib.get_close_matches(word.lower().replace("_", "-"), names, n=1)]
    hint = f"did you mean {close[0]!r}?" if close else "`trimtab rules` lists them."
    return f"there is no rule {word!r}; {hint}"
