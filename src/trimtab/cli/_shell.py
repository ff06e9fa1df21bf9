"""What every command shares: option spellings, clean errors, exit codes, a console, and JSON for machines."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, fields, is_dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn, ParamSpec, Protocol

import typer

from trimtab.core.printable import brief, printable, safe_json

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

YES = frozenset({"true", "1", "yes"})
NO = frozenset({"false", "0", "no"})

SCHEMA_VERSION = 1
OK, DIFFERENT, UNUSABLE, INTERRUPTED = 0, 1, 2, 130

_wants_json: ContextVar[bool] = ContextVar("wants_json", default=False)
"""Whether the command that runs was given --json."""


def command(body: Callable[P, int]) -> Callable[P, None]:
    """Make a function a command: its errors become one line on stderr, its result the exit code."""

    @functools.wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        _wants_json.set(bool(kwargs.get("as_json")))
        try:
            code = body(*args, **kwargs)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            raise  # the reader went away (`| head`): typer ends quietly
        except Exception as error:
            from trimtab.core.errors import TrimtabError

            if not isinstance(error, TrimtabError | OSError):
                raise
            fail(str(error), kind=type(error).__name__)
        if code:
            raise typer.Exit(code)

    return run


def fail(message: str, *, kind: str = "InputError") -> NoReturn:
    """Print what is wrong on stderr and end with exit code 2; after --json also as one JSON object on stdout."""
    if _wants_json.get():
        emit_error(message, kind)
    print(f"error: {printable(message)}", file=sys.stderr)
    raise typer.Exit(UNUSABLE)


def emit_error(message: str, kind: str) -> None:
    """Print one JSON object on stdout that says what went wrong: `{"error": {"kind": …, "message": …}}`."""
    emit({"error": {"kind": kind, "message": message}})


def console(*, whole_screen: bool = False) -> Console:
    """Where people read: colours and width follow the terminal, NO_COLOR and FORCE_COLOR.

    For the `whole_screen` the size is that of the terminal, also after a resize: COLUMNS and LINES, where a shell
    exports them, keep the size that it had when the command began.
    """
    from trimtab.report.text import SafeConsole

    if not whole_screen:
        return SafeConsole()
    return SafeConsole(_environ={name: v for name, v in os.environ.items() if name not in ("COLUMNS", "LINES")})


def emit(data: Mapping[str, object]) -> None:
    """Print one JSON object on stdout. Numbers JSON cannot hold become "NaN", "Infinity" and "-Infinity"."""
    entries = {"schema_version": SCHEMA_VERSION} | {key: plain(value) for key, value in data.items()}
    text = json.dumps(entries, ensure_ascii=False, allow_nan=False)
    print(safe_json(text))


def plain(value: object) -> Json:
    """Reduce records, enums, arrays and non-finite numbers to what JSON can hold.

    Example:
        >>> plain({"loss": float("nan"), "steps": (1, 2)})
        {'loss': 'NaN', 'steps': [1, 2]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, IntEnum):
        return value.name.lower()
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    to_list = getattr(value, "tolist", None)  # numpy, without importing it
    if to_list is not None:
        return plain(to_list())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 10_000:
        return brief(value)  # no reader of JSON takes thousands of digits
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


# -- spellings of options: `--flag true`, `--flag=0`, `--some_option` --------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The long and short option names of a program: those that are flags, and those that take a value."""

    flags: Collection[str]
    valued: Collection[str]


class Parameter(Protocol):
    """An option or argument, of click or of the copy of it inside typer."""

    @property
    def param_type_name(self) -> str:
        """`option` or `argument`."""
        ...

    @property
    def opts(self) -> Sequence[str]:
        """Its names."""
        ...

    @property
    def secondary_opts(self) -> Sequence[str]:
        """The names that turn it off."""
        ...


class ParsedCommand(Protocol):
    """A command, of click or of the copy of it inside typer."""

    @property
    def params(self) -> Sequence[Parameter]:
        """Its options and arguments."""
        ...


def options_of(command: ParsedCommand) -> Options:
    """Collect the options of a command and all its subcommands."""
    flags: set[str] = set()
    valued: set[str] = set()
    for param in command.params:
        if param.param_type_name == "option":
            (flags if getattr(param, "is_flag", False) else valued).update((*param.opts, *param.secondary_opts))
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
