"""What every command shares: clean errors, exit codes, a console, and JSON for machines."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec

import typer

from trimtab.core.printable import brief, printable, safe_json

if TYPE_CHECKING:
    from rich.console import Console

P = ParamSpec("P")

SCHEMA_VERSION = 1
OK, DIFFERENT, UNUSABLE, INTERRUPTED = 0, 1, 2, 130


def command(body: Callable[P, int]) -> Callable[P, None]:
    """Make a function a command: its errors become one line on stderr, its result the exit code."""

    @functools.wraps(body)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
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
            fail(str(error))
        if code:
            raise typer.Exit(code)

    return run


def fail(message: str) -> NoReturn:
    """Say what is wrong on stderr and end with exit code 2."""
    print(f"error: {printable(message)}", file=sys.stderr)
    raise typer.Exit(UNUSABLE)


def console() -> Console:
    """Where people read: colours and width follow the terminal, NO_COLOR and FORCE_COLOR."""
    from trimtab.report.text import SafeConsole

    return SafeConsole()


def emit(data: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout. Numbers JSON cannot hold become "NaN", "Infinity" and "-Infinity"."""
    text = json.dumps({"schema_version": SCHEMA_VERSION} | plain(data), ensure_ascii=False, allow_nan=False)
    print(safe_json(text))


def plain(value: Any) -> Any:
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
    if hasattr(value, "tolist"):  # numpy, without importing it
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 10_000:
        return brief(value)  # no reader of JSON takes thousands of digits
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
