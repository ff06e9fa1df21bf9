"""Lets people spell options as they are used to: `--flag true`, `--flag=0`, `--some_option`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

YES = frozenset({"true", "1", "yes"})
NO = frozenset({"false", "0", "no"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The long and short option names of a program: those that are flags, and those that take a value."""

    flags: Collection[str]
    valued: Collection[str]


def options_of(command: Any) -> Options:
    """Collect the options of a command and all its subcommands."""
    flags: set[str] = set()
    valued: set[str] = set()
    for param in command.params:
        if param.param_type_name == "option":
            (flags if param.is_flag else valued).update((*param.opts, *param.secondary_opts))
    for sub in getattr(command, "commands", {}).values():
        inner = options_of(sub)
        flags.update(inner.flags)
        valued.update(inner.valued)
    return Options(flags=flags, valued=valued)


def normalise(argv: Sequence[str], options: Options) -> list[str]:
    """Rewrite `argv` into the one spelling the parser knows; everything after a bare `--` stays as it is.

    Example:
        >>> normalise(["report", "--json", "true", "x"], Options(flags={"--json"}, valued=()))
        ['report', '--json', 'x']
        >>> normalise(["report", "--json=no", "x"], Options(flags={"--json"}, valued=()))
        ['report', 'x']
    """
    out: list[str] = []
    rest = list(argv)
    while rest:
        token = rest.pop(0)
        if token == "--":
            return [*out, token, *rest]
        if not token.startswith("-") or token == "-":
            out.append(token)
            continue
        name, equals, value = token.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if name in options.valued:
            out.append(name + equals + value)
            if not equals and rest:
                out.append(rest.pop(0))  # a value is never read as an option
            continue
        if name in options.flags:
            if not equals and rest and rest[0].lower() in YES | NO:
                equals, value = "=", rest.pop(0)
            if value.lower() in NO:
                continue  # every flag is off unless given
            if not equals or value.lower() in YES:
                out.append(name)
                continue
        out.append(name + equals + value)
    return out
