"""Processes that a program starts: those of `multiprocessing` are guarded, too, and tell the first one how it went."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

NUM_COMMANDS = 20


class Exchange:
    """A folder of their own in which processes of one run leave notes for the first of them."""

    def __init__(self, folder: str | None = None) -> None:
        name = f"trimtab-run-{os.getpid()}-{os.urandom(4).hex()}"
        self.folder = Path(folder or os.path.join(tempfile.gettempdir(), name))

    def tell(self, runs: list[dict[str, Any]], *, begin: bool) -> bool:
        """Leave a note about this process's trainings; False where nobody is there to read it any more."""
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
        """Whether no other process has said this yet; if so, it is said now. Alone one is always the first."""
        try:
            name = re.sub(r"\W+", "-", what)
            os.close(os.open(self.folder / f"{name}.said", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return False
        except OSError:
            return True
        return True

    def collect(self) -> list[dict[str, Any]]:
        """What the others left, and no trace of it."""
        found: list[dict[str, Any]] = []
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob("*.json")):
                with contextlib.suppress(ValueError):
                    found += [run for run in json.loads(path.read_text(encoding="utf-8")) if isinstance(run, dict)]
        shutil.rmtree(self.folder, ignore_errors=True)
        return found


def at_child_end(function: Callable[[], object]) -> None:
    """Call a function when this process ends. One of `multiprocessing` runs no exit handlers, but these."""
    if "multiprocessing" in sys.modules:
        from multiprocessing import util

        util.Finalize(None, function, exitpriority=100)


def guard_spawned(begin: Mapping[str, Any]) -> Callable[[], None]:
    """Let every process that is spawned from now on begin with `begin_child(begin)`; returns how to stop that."""
    undo: list[Callable[[], None]] = []

    def patch() -> None:
        from multiprocessing import process  # the rest of it may still be under way

        inner = process.BaseProcess.__reduce_ex__

        def reduce(this: Any, protocol: Any) -> Any:
            from multiprocessing import context, spawn

            made = inner(this, protocol)
            if context.get_spawning_popen() is None or not isinstance(made, tuple):
                return made
            if os.fsdecode(spawn.get_executable() or b"") != sys.executable:
                return made  # another interpreter may have no trimtab
            return (revive, (dict(begin), made[0], made[1]), *made[2:])

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


def revive(begin: Mapping[str, Any], function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """In a spawned child, before it knows what to run. A failure of ours is said, and costs nothing else."""
    try:
        from trimtab.run.runner import begin_child

        begin_child(begin)
    except Exception as error:
        sys.stderr.write(f"trimtab: cannot guard this process ({type(error).__name__}: {error})\n")
    return function(*args)


class Commands:
    """The Python programs that were started as commands: nobody guards those."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def watch(self) -> Callable[[], None]:
        """Begin; returns how to stop."""
        undo: list[Callable[[], None]] = []

        def patch() -> None:
            import subprocess

            inner = subprocess.Popen.__init__

            @functools.wraps(inner)
            def begin(this: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
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

    def _note(self, args: Any) -> None:
        words = args.split() if isinstance(args, str) else [os.fspath(word) for word in args]
        words = [word.decode() if isinstance(word, bytes) else str(word) for word in words]
        if words and re.fullmatch(r"(python[\d.]*|torchrun|accelerate)", os.path.basename(words[0])):
            self.seen.append(" ".join(_program(words)))
            del self.seen[NUM_COMMANDS:]


def _program(words: list[str]) -> Iterator[str]:
    """What of a command says which program it is: no options of the interpreter."""
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
    """Call `then` right after the module `name` was executed; at once if it is there already.

    What `then` raises is its own to contain: it would surface in the script's import.
    """
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Stands first in line for one module, lets the others find it, and wraps the loader they give."""

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
