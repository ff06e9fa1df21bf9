"""Runs a script or a module as `python` would: same `__main__`, same arguments, same path, same traceback."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.core.errors import InputError


class CannotStart(InputError):
    """The program was not found; nothing of it has run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run: a script's path or (`module`) a dotted name, and its arguments."""

    target: str
    args: Sequence[str] = ()
    module: bool = False


def run_program(program: Program) -> None:
    """Execute it in this process. Whatever it raises comes out, its traceback beginning in the program itself."""
    code, main, argv0 = _module(program.target) if program.module else _script(program.target)
    sys.argv[:] = [argv0, *program.args]
    sys.modules["__main__"] = main  # for good: pickles, threads and exit handlers of the program look for it there
    try:
        exec(code, main.__dict__)
    except BaseException:
        _hide_our_frames(main)
        raise


def _script(target: str) -> tuple[Any, types.ModuleType, str]:
    path = Path(target)
    if path.is_dir() or target.endswith((".zip", ".pyz")):
        sys.path[0] = str(path)
        code, main, _ = _module("__main__")
        return code, main, target
    try:
        with io.open_code(os.path.abspath(target)) as file:
            source = file.read()
    except OSError as error:
        raise CannotStart(
            f"cannot read the script {target!r} ({error.strerror}); expected the path of a Python file, "
            "or `-m` and the name of a module"
        ) from None
    sys.path[0] = os.path.dirname(os.path.realpath(target))
    where = os.path.abspath(target)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=where,
        __cached__=None,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", where),
    )
    sys.modules["__main__"] = main
    return _compiled(source, where, main), main, target


def _compiled(source: bytes, where: str, main: types.ModuleType) -> Any:
    try:
        return compile(source, where, "exec", dont_inherit=True)
    except SyntaxError:
        _hide_our_frames(main)
        raise


def _module(name: str) -> tuple[Any, types.ModuleType, str]:
    if name != "__main__":
        sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, ValueError) as error:
        raise CannotStart(
            f"cannot import {name!r} ({error}); expected the name of a module, as for `python -m`"
        ) from None
    loader = None if spec is None else spec.loader
    get_code = getattr(loader, "get_code", None)
    code = None if spec is None or get_code is None else get_code(spec.name)
    if spec is None or code is None:
        raise CannotStart(f"no module named {name!r} that can be run; expected a module, as for `python -m`")
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __builtins__=builtins,
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return code, main, str(spec.origin)


def _hide_our_frames(main: types.ModuleType) -> None:
    """Let the traceback that is about to be printed begin in the program: what is above it is none of its business."""
    inner = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        at = trace
        while at is not None and at.tb_frame.f_globals is not main.__dict__:
            at = at.tb_next
        inner(kind, error.with_traceback(at), at)

    sys.excepthook = hook
