"""Processes that a program starts: those of `multiprocessing` are guarded, too, and report to the first process."""

from __future__ import annotations

import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from trimtab.run.guarded_training import Summary

NUM_COMMANDS = 20


Command = str | Sequence[str | bytes | os.PathLike[str] | os.PathLike[bytes]]
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class ChildStart(TypedDict):
    """What a spawned process needs to guard its trainings: pickled with it."""

    settings: dict[str, Any]
    quiet: bool
    home: str
    folder: str


class Exchange:
    """A folder in which the processes of one run leave summaries for the first process."""

    def __init__(self, folder: str | None = None) -> None:
        name = f"trimtab-run-{os.getpid()}-{os.urandom(4).hex()}"
        self.folder = Path(folder or os.path.join(tempfile.gettempdir(), name))

    def write(self, runs: list[Summary], *, begin: bool) -> bool:
        """Write the summaries of this process's trainings; False if the folder is gone."""
        try:
            if begin:
                self.folder.mkdir(mode=0o700, exist_ok=True)
            path = self.folder / f"{os.getpid()}.json"
            temporary = path.with_suffix(".new")
            temporary.write_text(json.dumps(runs), encoding="utf-8")
            os.replace(temporary, path)
        except OSError:
            return False
        return True

    def is_first(self, what: str) -> bool:
        """Whether no other process has printed this yet. Marks it as printed."""
        try:
            name = re.sub(r"\W+", "-", what)
            os.close(os.open(self.folder / f"{name}.said", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def collect(self) -> list[Summary]:
        """The summaries of the other processes. Removes the folder."""
        found: list[Summary] = []
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob("*.json")):
                with contextlib.suppress(ValueError):
                    runs: list[Summary] = json.loads(path.read_text(encoding="utf-8"))
                    found += [run for run in runs if isinstance(run, dict)]
        shutil.rmtree(self.folder, ignore_errors=True)
        return found


def at_child_end(function: Callable[[], object]) -> None:
    """Call a function when this process ends. One of `multiprocessing` runs no exit handlers, but these."""
    if "multiprocessing" in sys.modules:
        from multiprocessing import util

        util.Finalize(None, function, exitpriority=100)


def guard_spawned(begin: ChildStart) -> Callable[[], None]:
    """Let every process that is spawned from now on begin with `begin_child(begin)`; returns the undo function."""
    undo: list[Callable[[], None]] = []

    def patch() -> None:
        from multiprocessing import process  # the rest of the package may still be loading

        inner = process.BaseProcess.__reduce_ex__

        def reduce(this: object, protocol: SupportsIndex) -> str | tuple[Any, ...]:
            from multiprocessing import context, spawn

            made = inner(this, protocol)
            if context.get_spawning_popen() is None or not isinstance(made, tuple):
                return made
            if os.fsdecode(spawn.get_executable() or b"") != sys.executable:
                return made  # another interpreter may have no trimtab
            return (revive, (begin, made[0], made[1]), *made[2:])

        process.BaseProcess.__reduce_ex__ = reduce  # type: ignore[method-assign]

        def back() -> None:
            if process.BaseProcess.__dict__.get("__reduce_ex__") is reduce:
                del process.BaseProcess.__reduce_ex__

        undo.append(back)

    when_imported("multiprocessing.process", patch)

    def stop() -> None:
        for back in undo:
            back()
        undo.clear()

    return stop


def revive(begin: ChildStart, function: Callable[[*Ts], R], args: tuple[*Ts]) -> R:
    """Start guarding in a spawned child before it unpickles its task. A failure of ours is only printed."""
    try:
        from trimtab.run.runner import begin_child

        begin_child(begin)
    except Exception as error:
        sys.stderr.write(f"trimtab: cannot guard this process ({type(error).__name__}: {error})\n")
    return function(*args)


class Commands:
    """The Python programs that were started as commands, which are not guarded."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def watch(self) -> Callable[[], None]:
        """Start watching; returns the undo function."""
        undo: list[Callable[[], None]] = []

        def patch() -> None:
            import subprocess

            inner = subprocess.Popen.__init__

            @functools.wraps(inner)
            def begin(this: subprocess.Popen[Any], args: Command, *rest: Any, **kwargs: Any) -> None:
                inner(this, args, *rest, **kwargs)
                with contextlib.suppress(Exception):
                    self._note(args)

            subprocess.Popen.__init__ = begin  # type: ignore[method-assign, assignment]

            def back() -> None:
                if subprocess.Popen.__init__ is begin:
                    subprocess.Popen.__init__ = inner  # type: ignore[method-assign]

            undo.append(back)

        when_imported("subprocess", patch)

        def stop() -> None:
            for back in undo:
                back()
            undo.clear()

        return stop

    def _note(self, args: Command) -> None:
        words = args.split() if isinstance(args, str) else [os.fsdecode(word) for word in args]
        if words and re.fullmatch(r"(python[\d.]*|torchrun|accelerate)", os.path.basename(words[0])):
            self.seen.append(" ".join(_program(words)))
            del self.seen[NUM_COMMANDS:]


def _program(words: list[str]) -> Iterator[str]:
    """The words of a command that name the program, without options of the interpreter."""
    if os.path.basename(words[0]).startswith("python"):
        rest = iter(words[1:])
        for word in rest:
            if word in ("-m", "-c"):
                yield f"{word} {next(rest, '')[:40]}"
                return
            if not word.startswith("-"):
                yield word
                return
    yield words[0]


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` right after the module `name` was executed; at once if it is imported already.

    `then` must not raise: the exception would surface in the script's import.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Comes first for one module, lets the other finders find it, and wraps the loader that they return."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # one import is enough, and the search below must not come back here
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        loader, then = spec.loader, self._then
        inner = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            loader.exec_module = inner  # type: ignore[method-assign]
            inner(module)
            then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
