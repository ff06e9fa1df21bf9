"""Runs a script or a module as `python` would: same `__main__`, same arguments, same path, same traceback."""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import io
import os
import sys
import threading
import types
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab.core.errors import InputError
from trimtab.run.children import console_script

OURS = str(Path(__file__).parents[1]) + os.sep
LAUNCHERS = frozenset({"<frozen runpy>", os.path.abspath(sys.argv[0])})
"""Files of the frames above a program: our own, and what started us."""


Loaded = tuple[types.CodeType, types.ModuleType, str]
"""The code of a program, its `__main__`, and its `sys.argv[0]`."""


class CannotStart(InputError):
    """The program was not found; nothing of it has run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run: a script's path or (`module`) a dotted name, and its arguments."""

    target: str
    args: Sequence[str] = ()
    module: bool = False


def run_program(program: Program) -> None:
    """Execute it in this process. What it raises passes through, with a traceback that begins in the program itself."""
    code, main, argv0 = _module(program.target) if program.module else _script(program.target)
    sys.argv[:] = [argv0, *program.args]
    sys.modules["__main__"] = main  # not undone: pickles, threads and exit handlers look there
    _hide_in_threads()
    try:
        exec(code, main.__dict__)
    except BaseException:
        _hide_our_frames()
        raise


def _script(target: str) -> Loaded:
    path = Path(target)
    if path.is_dir() or target.endswith((".zip", ".pyz")):
        sys.path[0] = os.path.abspath(path)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [str(path)])
        code, main, _ = _loaded(spec, f"{target} holds no __main__.py; expected a folder or archive that does")
        return code, main, target
    if not path.exists() and (found := console_script(target)) is not None:
        target = found  # `trimtab run torchrun ...`
    try:
        with io.open_code(os.path.abspath(target)) as file:
            source = file.read()
    except OSError as error:
        raise CannotStart(
            f"cannot read the script {target!r} ({error.strerror}); expected the path of a Python file, "
            "or `-m` and the name of a module. For another launcher put trimtab behind it: "
            "LAUNCHER ... -m trimtab run train.py"
        ) from None
    sys.path[0] = os.path.dirname(os.path.realpath(target))
    where = os.path.abspath(target)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=where,
        __cached__=None,
        __builtins__=builtins,
        __annotations__={},
        __loader__=importlib.machinery.SourceFileLoader("__main__", where),
    )
    sys.modules["__main__"] = main
    return _compiled(source, where), main, target


def _compiled(source: bytes, where: str) -> types.CodeType:
    try:
        return compile(source, where, "exec", dont_inherit=True)
    except SyntaxError:
        _hide_our_frames()
        raise


def _module(name: str) -> Loaded:
    sys.path[0] = os.getcwd()
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, AttributeError, ValueError) as error:
        raise CannotStart(
            f"cannot import {name!r} ({error}); expected the name of a module, as for `python -m`"
        ) from None
    return _loaded(spec, f"no module named {name!r} that can be run; expected a module, as for `python -m`")


def _loaded(spec: importlib.machinery.ModuleSpec | None, otherwise: str) -> Loaded:
    loader = None if spec is None else spec.loader
    get_code = getattr(loader, "get_code", None)
    code = None if spec is None or get_code is None else get_code(spec.name)
    if spec is None or code is None:
        raise CannotStart(otherwise)
    main = types.ModuleType("__main__")
    main.__dict__.update(
        __file__=spec.origin,
        __cached__=spec.cached,
        __builtins__=builtins,
        __annotations__={},
        __loader__=loader,
        __package__=spec.parent,
        __spec__=spec,
    )
    return code, main, str(spec.origin)


def _hide_our_frames() -> None:
    """Let tracebacks that are printed for the program show only frames of its own and of what it calls."""
    inner = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        inner(kind, _cleared(error), error.__traceback__)

    sys.excepthook = hook


def _hide_in_threads() -> None:
    inner = threading.excepthook

    def hook(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            _cleared(args.exc_value)
            args = threading.ExceptHookArgs((args.exc_type, args.exc_value, args.exc_value.__traceback__, args.thread))
        inner(args)

    threading.excepthook = hook


def _cleared(error: BaseException) -> BaseException:
    """The error, and those that led to it, without our frames in their tracebacks."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        at.__traceback__ = _without_ours(at.__traceback__)
        at = at.__cause__ or at.__context__
    return error


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    frames: list[types.TracebackType] = []
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if not file.startswith(OURS) and file not in LAUNCHERS:
            frames.append(trace)
        trace = trace.tb_next
    out: types.TracebackType | None = None
    for one in reversed(frames):
        out = types.TracebackType(out, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return out
