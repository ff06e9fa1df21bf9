"""Which rules there are, and which of them a configuration wants, at which severity."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, get_type_hints

from trimtab.core.config import Config
from trimtab.core.config_read import Reader, bad, boolean, integer, number, severity, text
from trimtab.core.errors import ConfigError
from trimtab.core.suggest_name import did_you_mean, nearest_name
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
    _check_words(config)
    return tuple(
        _build(rule, config) for rule in all_rules() if _any(config.select, rule) and not _any(config.ignore, rule)
    )


def check_options(config: Config) -> None:
    """Refuse names of rules that do not exist, and options that their rules do not have or cannot use."""
    _check_words(config)
    for rule in all_rules():
        _options(rule, config)


def _check_words(config: Config) -> None:
    for word in (*config.select, *config.ignore, *config.severity, *config.rules):
        if not any(_matches(word, r) for r in all_rules()):
            raise ConfigError(_unknown(word))


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
    return rule(**_options(rule, config))


def _options(rule: type[Rule], config: Config) -> dict[str, Any]:
    """The options of a rule that are not its usual ones, each checked."""
    readers = _readers(rule)
    options: dict[str, Any] = {}
    for word, values in config.rules.items():
        for key, value in values.items() if _matches(word, rule) else ():
            name = str(key).replace("-", "_")
            if name not in readers:
                hint = did_you_mean(name, readers, otherwise=f"it has {', '.join(sorted(readers))}.")
                raise ConfigError(f"rule {rule.code} ({rule.name}) has no setting {key!r}; {hint}")
            options[name] = readers[name](value, f"rules.{word}.{key}")
    for word, value in config.severity.items():
        if _matches(word, rule):
            options["severity"] = severity(value, f"severity.{word}")
    return options


@cache
def _readers(rule: type[Rule]) -> dict[str, Reader]:
    """How each option of a rule is read: by its annotation, and from 0 on unless what is usual is below 0."""
    if not is_dataclass(rule):
        return {}
    try:
        kinds = get_type_hints(rule)
    except NameError:  # a plug-in that imports its types only for the type checker
        kinds = {}
    return {f.name: _reader(kinds.get(f.name, type(f.default)), f.default) for f in fields(rule) if f.init}


def _reader(kind: object, usual: object) -> Reader:
    low = 0 if isinstance(usual, int | float) and usual >= 0 else -math.inf
    if kind is Severity:
        return severity
    if kind is bool:
        return boolean
    if kind is int:
        return integer(int(low)) if low == 0 else _whole
    if kind is float:
        return partial(_number, low=low)
    if kind is str:
        return text
    return lambda value, name: value  # what a plug-in makes of it is its own business


def _whole(value: object, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad(name, value, "a whole number")
    return value


def _number(value: object, name: str, low: float) -> float:
    found = number(value)
    if found is None or found < low:
        raise bad(name, value, "a finite number" + (" of at least 0" if low == 0 else ""))
    return found


def _any(words: Iterable[str], rule: type[Rule]) -> bool:
    return any(_matches(w, rule) for w in words)


def _matches(word: str, rule: type[Rule]) -> bool:
    """`ALL`, a code, a family (`GRAD`), or a name."""
    w = word.strip().upper().replace("_", "-")
    return w == "ALL" or w in (rule.code, rule.name.upper(), rule.code.rstrip("0123456789"))


def _unknown(word: str) -> str:
    names = {n.lower(): n for r in all_rules() for n in (r.code, r.name, r.code.rstrip("0123456789"))}
    near = nearest_name(word.lower().replace("_", "-"), names)
    hint = "`trimtab rules` lists them." if near is None else f"did you mean {names[near]!r}?"
    return f"there is no rule {word!r}; {hint}"
