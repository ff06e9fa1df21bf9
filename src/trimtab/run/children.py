"""Processes that a program starts: those that run Python are guarded, too, and report to the first process."""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import pickle
import re
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, SupportsIndex, TypedDict, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from trimtab.run.guarded_training import Summary

NUM_COMMANDS = 20
WAIT_S = 5.0
"""How long the first process waits at its end for children that still train."""


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

    def under_way(self) -> set[int]:
        """The processes with trainings that have not ended."""
        return {run["pid"] for run in self._read() if not run["ended"]}

    def collect(self) -> list[Summary]:
        """The summaries of the other processes. Removes the folder."""
        found = self._read()
        shutil.rmtree(self.folder, ignore_errors=True)
        return found

    def _read(self) -> list[Summary]:
        found: list[Summary] = []
        with contextlib.suppress(OSError):
            for path in sorted(self.folder.glob("*.json")):
                with contextlib.suppress(ValueError):
                    runs: list[Summary] = json.loads(path.read_text(encoding="utf-8"))
                    found += [run for run in runs if isinstance(run, dict)]
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


ISOLATING = frozenset("EIsS")
"""Options of the interpreter, by their letter, after which it may not find trimtab."""
VALUED = frozenset("WX")
"""Options of the interpreter that a word may follow."""
UNGUARDED = frozenset({"pip", "trimtab"})
"""Modules that are not guarded when they are run with `-m`, besides those of the standard library."""
HELPERS = os.sep + os.path.join("torch", "_inductor") + os.sep
"""Part of the path of programs that PyTorch starts to compile code."""


class Commands:
    """Python programs that are started as commands: guarded where the interpreter is ours, else named at the end."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        """Those that are not guarded."""
        self._guarded: weakref.WeakSet[Any] = weakref.WeakSet()

    def wait(self, pids: Callable[[], Collection[int]]) -> None:
        """Wait a little for guarded programs that are about to end: of a training in several processes one is first."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            training = set(pids())
            if not any(one.pid in training and one.poll() is None for one in list(self._guarded)):
                return
            time.sleep(0.05)

    def watch(self, begin: ChildStart) -> Callable[[], None]:
        """Guard those that are started from now on; returns the undo function."""
        undo: list[Callable[[], None]] = []
        start = encoded(begin)

        def patch() -> None:
            import subprocess

            inner = subprocess.Popen.__init__

            @functools.wraps(inner)
            def start_one(this: subprocess.Popen[Any], args: Command, *rest: Any, **kwargs: Any) -> None:
                guarded: Command | None = None
                with contextlib.suppress(Exception):
                    if not rest and not kwargs.get("shell") and kwargs.get("executable") is None:
                        guarded = guarded_command(args, start, kwargs.get("cwd"))
                inner(this, args if guarded is None else guarded, *rest, **kwargs)
                this.args = args
                if guarded is not None:
                    self._guarded.add(this)
                    return
                with contextlib.suppress(Exception):
                    self._note(args)

            subprocess.Popen.__init__ = start_one  # type: ignore[method-assign, assignment]

            def back() -> None:
                if subprocess.Popen.__init__ is start_one:
                    subprocess.Popen.__init__ = inner  # type: ignore[method-assign]

            undo.append(back)

        when_imported("subprocess", patch)

        def stop() -> None:
            for back in undo:
                back()
            undo.clear()

        return stop

    def _note(self, args: Command) -> None:
        words = _words(args)
        if words and re.fullmatch(r"(python[\d.]*|torchrun|accelerate)", os.path.basename(words[0])):
            self.seen.append(" ".join(_program(words)))
            del self.seen[NUM_COMMANDS:]


def encoded(begin: ChildStart) -> str:
    """What a child needs, as one word of a command line."""
    return base64.urlsafe_b64encode(pickle.dumps(begin)).decode()


def decoded(word: str) -> ChildStart:
    """What `encoded` made a word of."""
    begin: ChildStart = pickle.loads(base64.urlsafe_b64decode(word))
    return begin


def guarded_command(args: Command, start: str, cwd: str | os.PathLike[str] | None = None) -> list[str] | None:
    """The command that runs the same Python program under guard; None if it is none, or not to be guarded.

    Example:
        >>> guarded_command([sys.executable, "-u", __file__, "--epochs", "3"], "START")[1:]  # doctest: +ELLIPSIS
        ['-u', '...child.py', 'START', '...children.py', '--epochs', '3']
        >>> guarded_command(["ls", "-l"], "START") is None
        True
    """
    if isinstance(args, str | bytes):
        return None
    words = _words(args)
    launcher = str(Path(__file__).with_name("child.py"))
    if words and is_ours(words[0]):
        options, rest = _options(words[1:])
        if options is None or not rest:
            return None
        if rest[0] == "-m":
            top = rest[1].split(".")[0] if len(rest) > 1 else "pip"
            if top in UNGUARDED or top in sys.stdlib_module_names:
                return None
        elif not os.path.isfile(os.path.join(cwd or "", rest[0])) or HELPERS in os.path.abspath(rest[0]):
            return None
        return [words[0], *options, launcher, start, *rest]
    if words and (script := console_script(words[0])) is not None:
        return [sys.executable, launcher, start, script, *words[1:]]
    return None


def is_ours(program: str) -> bool:
    """Whether this command starts the interpreter that runs now."""
    found = shutil.which(program)
    if found is None or not sys.executable:
        return False
    same = os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(sys.executable))
    return same and os.path.samefile(found, sys.executable)


def console_script(program: str) -> str | None:
    """The file of a command such as `torchrun`, if that is a script for the interpreter that runs now."""
    found = shutil.which(program) or shutil.which(program, path=os.path.dirname(sys.executable))
    if found is None or os.path.basename(found).startswith(("python", "pip", "trimtab")):
        return None
    with open(found, "rb") as file:
        first = file.readline(500)
    if not first.startswith(b"#!"):
        return None
    return os.path.abspath(found) if is_ours(os.fsdecode(first[2:].split()[0])) else None


def _options(words: list[str]) -> tuple[list[str] | None, list[str]]:
    """Options of the interpreter, None if with them nothing can be guarded; and what follows: a script, or `-m`."""
    options: list[str] = []
    rest = list(words)
    while rest and rest[0].startswith("-"):
        word = rest[0]
        if word == "-m":
            return options, rest
        if word in ("-", "-c") or word.startswith(("--", "-c", "-i")) or ISOLATING & set(word[1:]) - VALUED:
            return None, rest
        options.append(rest.pop(0))
        if word[1] in VALUED and len(word) == 2 and rest:
            options.append(rest.pop(0))
    return options, rest


def _words(args: Command) -> list[str]:
    if isinstance(args, str):
        return args.split()
    if isinstance(args, bytes | os.PathLike):
        return [os.fsdecode(args)]
    return [os.fsdecode(word) for word in args]


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
