"""Runs a program under guard, from its start to the last line on stderr."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trimtab.core.errors import TrainingStopped
from trimtab.core.printable import FINDINGS_LOG, LINES_LOG
from trimtab.run.children import ChildStart, Commands, Exchange, at_child_end, guard_spawned, when_imported
from trimtab.run.endings import Endings
from trimtab.run.frameworks import SEAMS
from trimtab.run.script import CannotStart, Program, run_program

if TYPE_CHECKING:
    from trimtab.run.auto_guard import AutoGuard
    from trimtab.run.guarded_training import GuardedTraining


STOPPED = 70
"""Exit code of a program whose training was stopped by its guard, if the program does not catch that."""
NUM_NAMED, NUM_SHOWN = 4, 6

log = logging.getLogger("trimtab")


def run_guarded(program: Program, settings: Mapping[str, Any], *, quiet: bool = False, as_json: bool = False) -> None:
    """Run the program under guard. Output, input and exit code are its own; our lines go to stderr.

    Args:
        program: What to run.
        settings: Keywords for each `Guard`.
        quiet: Print nothing on stderr.
        as_json: End with one JSON object on stderr instead of sentences.
    """
    run = _GuardedRun(settings, sys.stderr, quiet=quiet, as_json=as_json)
    when_imported("torch", run.start)
    run.watch_children()
    _run(run, program)


def run_child(program: Program, begin: ChildStart) -> None:
    """Run a program that a guarded program started as a command: guarded, too; the first process reports it."""
    run = _GuardedRun(begin["settings"], sys.stderr, quiet=begin["quiet"], as_json=False, home=begin["home"])
    run.belong_to(Exchange(begin["folder"]))
    when_imported("torch", run.start)
    _run(run, program)


def _run(run: _GuardedRun, program: Program) -> None:
    # First registered, last called: the program's own exit handlers and threads that outlive it are guarded, too.
    atexit.register(run.finish)
    try:
        run_program(program)
    except CannotStart:
        run.cancel()
        raise
    except TrainingStopped as stop:
        run.finish("stopped")
        run.say(f"stopped for its health. {stop}")
        raise SystemExit(STOPPED) from None
    except Exception as error:
        run.finish(type(error).__name__)  # while it is being handled, so that the record shows it
        raise
    except SystemExit as end:
        run.reason = getattr(end, "reason", run.reason)  # set if a signal asked for the exit
        raise
    except BaseException as end:
        run.reason = type(end).__name__
        raise


def begin_child(begin: ChildStart) -> None:
    """In a process that a guarded program spawned: guard what it trains, too."""
    run = _GuardedRun(begin["settings"], sys.stderr, quiet=begin["quiet"], as_json=False, home=begin["home"])
    run.belong_to(Exchange(begin["folder"]))
    when_imported("torch", run.wait_for_an_optimizer)
    for module, *_ in SEAMS:
        when_imported(module, run.start_once)  # it builds optimizers when it is too late to add a callback


class _GuardedRun:
    """One program under guard: its `AutoGuard` once PyTorch is imported, its child processes, what stderr shows."""

    def __init__(
        self, settings: Mapping[str, Any], stream: TextIO, *, quiet: bool, as_json: bool, home: str | None = None
    ) -> None:
        self._settings, self._stream, self._quiet, self._as_json = settings, stream, quiet, as_json
        self._auto_guard: AutoGuard | None = None
        self._home = home or os.getcwd()
        self._trainings: list[GuardedTraining] = []
        self._finishing = threading.Lock()
        self._finished = self._is_child = self._awaited = False
        self._pid = os.getpid()
        self._exchange, self._commands, self._endings = Exchange(), Commands(), Endings(self._cut_short)
        self._undo: list[Callable[[], None]] = []
        self.reason = "closed"

    # -- the start -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """PyTorch is imported: watch every optimizer from here on. If that fails, the program runs unguarded."""
        try:
            from trimtab.core.journal import Said
            from trimtab.record.sinks import ConsoleSink
            from trimtab.run.auto_guard import AutoGuard

            # The last registered handler runs first: ours must run before that of the recorder, just imported.
            atexit.unregister(self.finish)
            atexit.register(self.finish)
            self._own_the_log()
            said = Said(self._exchange.is_first)
            sinks = list if self._quiet else (lambda: [ConsoleSink(stream=self._stream, said=said)])
            ended = self._trainings.append
            auto_guard = AutoGuard(self._settings, ended, sinks=sinks, on_begin=self._begun, on_fork=self._forked)
            auto_guard.start()
            self._auto_guard = auto_guard
        except Exception as error:
            self.say(f"cannot guard this program ({type(error).__name__}: {error}); it runs unguarded")

    def start_once(self) -> None:
        """The same, unless it was started."""
        if self._auto_guard is None:
            self.start()

    def watch_children(self) -> None:
        """Watch for processes being started: guard what they train, or name them at the end."""
        begin: ChildStart = {
            "settings": {k: v for k, v in self._settings.items() if k not in ("checkpoint", "resume")},
            "quiet": self._quiet,
            "home": self._home,
            "folder": str(self._exchange.folder),
        }
        self._undo += [guard_spawned(begin), self._commands.watch(begin)]

    def wait_for_an_optimizer(self) -> None:
        """In a child, which may train nothing: begin when the first optimizer is built, or now if there is one."""
        from torch.optim.optimizer import Optimizer

        from trimtab.torchutil.patch import wrap_attribute

        if any(issubclass(type(o), Optimizer) for o in gc.get_objects()):
            self.start_once()
            return
        undo: list[Callable[[], None]] = []

        def begin(name: str, inner: object, this: Optimizer, *args: object, **kwargs: object) -> object:
            for put_back in undo:
                put_back()
            self.start_once()
            return getattr(Optimizer, name)(this, *args, **kwargs)

        names = ("__init__", "__setstate__")
        undo += [wrap_attribute(Optimizer, name, functools.partial(begin, name)) for name in names]

    def belong_to(self, exchange: Exchange) -> None:
        """This is a child: it reports to the first process."""
        self._exchange, self._is_child = exchange, True
        self.watch_children()

    def _forked(self) -> None:
        """In a forked child that begins to train: forget the trainings of the parent."""
        self._pid, self._is_child = os.getpid(), True
        self._finished = self._awaited = False
        self._trainings.clear()
        self._finishing, self._endings = threading.Lock(), Endings(self._cut_short)
        self.reason = "closed"

    def _begun(self, trainings: list[GuardedTraining]) -> None:
        """A record was opened: make sure that it is closed whatever ends the process."""
        self._endings.install()
        if self._is_child:
            if not self._awaited:
                self._awaited = True
                at_child_end(self.finish)
            self._exchange.write([t.summary() for t in (*self._trainings, *trainings)], begin=True)

    def _own_the_log(self) -> None:
        """Log to stderr only, as the program's logging may go to its output. The console sink prints findings."""
        handler = _Handler(self._stream)
        handler.setFormatter(logging.Formatter("trimtab: %(message)s"))
        log.addHandler(logging.NullHandler() if self._quiet else handler)
        log.setLevel(logging.WARNING)
        logging.getLogger(LINES_LOG).setLevel(logging.INFO)
        logging.getLogger(FINDINGS_LOG).setLevel(logging.CRITICAL + 1)  # the console sink prints them, with advice
        log.propagate = False

    # -- the end -------------------------------------------------------------------------------------------------

    def finish(self, reason: str | None = None) -> None:
        """Complete every record and print the summary; once."""
        if os.getpid() != self._pid or not self._finishing.acquire(blocking=False):
            return
        if self._finished:
            self._finishing.release()
            return
        self._finished = True
        try:
            if self._auto_guard is not None:
                self._auto_guard.finish(reason or self.reason)
            self._endings.remove()
            for undo in self._undo:
                undo()
            self._summarise()
        except Exception as error:  # an exit handler that raises would print into the program's own output
            self.say(f"the summary failed ({type(error).__name__}: {error})")
        finally:
            self._finishing.release()

    def _cut_short(self, reason: str) -> None:
        """A signal is about to end the process: complete every record without touching anything that may hang."""
        if os.getpid() != self._pid:
            return
        finishing, self._finished = self._finished, True
        from trimtab.record.recorder import close_all

        close_all(reason)
        if not finishing:  # else the summary is being printed already
            if self._auto_guard is not None:
                self._trainings += self._auto_guard.trainings
            self._summarise()

    def _summarise(self) -> None:
        trainings = [t for t in self._trainings if t.steps]
        if self._is_child and (not trainings or self._exchange.write([t.summary() for t in trainings], begin=False)):
            return
        if not self._is_child and self.reason == "closed":
            with contextlib.suppress(KeyError, TypeError):
                self._commands.wait(self._exchange.under_way)
        if not self._is_child and (from_children := self._exchange.collect()):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                from trimtab.run.guarded_training import GuardedTraining

                others = [GuardedTraining.from_summary(data) for data in from_children]
                trainings += [training for training in others if training.steps or not training.reason]
        if self._as_json:
            self._write(json.dumps({"schema_version": 1, "runs": [t.summary() for t in trainings]}) + "\n")
            return
        shown = sorted(trainings, key=lambda t: t.findings == 0)[:NUM_SHOWN]  # those with findings first
        for training in trainings:
            if training in shown:
                self.say(_sentence(training, self._pid))
                if training.run_dir is not None:
                    self.say(f"  trimtab report {_short(training.run_dir, self._home)}")
        if len(trainings) > len(shown):
            rest = len(trainings) - len(shown)
            num = sum(t.findings > 0 for t in trainings if t not in shown)
            self.say(f"and {rest} more trainings, {num} of them with findings; their records are in the same folder")
        if not trainings:
            for line in self._nothing():
                self.say(line)

    def _nothing(self) -> Iterator[str]:
        """Why nothing was guarded."""
        seen = None if self._auto_guard is None else self._auto_guard.seen
        if seen is not None and seen.lookalikes:
            names = ", ".join(sorted(seen.lookalikes))
            yield (
                f"no PyTorch optimizer was stepped. Seen instead: {names}. A guard needs an optimizer with "
                "param_groups and step()"
            )
        elif seen is not None and seen.num_backwards:
            yield (
                f"no optimizer was stepped, though backward() was called {_times(seen.num_backwards)}: "
                "updates made by hand are not guarded"
            )
        elif seen is not None and seen.built:
            what = ", ".join(_several(name, num) for name, num in seen.built.items())
            yield f"no optimizer was stepped ({what} built); there was nothing to guard"
        else:
            yield "no PyTorch optimizer was stepped; there was nothing to guard"
        if self._commands.seen:
            started = Counter(self._commands.seen).items()
            named = ", ".join(name if num == 1 else f"{name} {_times(num)}" for name, num in started)
            yield f"Python programs were started, which are not guarded ({named}); put `trimtab run` before them"

    def cancel(self) -> None:
        """Nothing was run: print no summary."""
        self._finished = True

    def say(self, text: str) -> None:
        """Print to stderr, each line marked as ours."""
        if not self._quiet:
            self._write("".join(f"trimtab: {line}\n" for line in text.splitlines()))

    def _write(self, text: str) -> None:
        """Write, even if the program closed the stream or another thread hangs in it."""
        with contextlib.suppress(ValueError, OSError):
            if threading.current_thread() is threading.main_thread():
                self._stream.write(text)
                self._stream.flush()
            else:
                os.write(self._stream.fileno(), text.encode("utf-8", "replace"))


class _Handler(logging.StreamHandler[TextIO]):
    """Stays silent about a stream that the program has closed."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Do not print into the program's output."""


def _short(path: Path, home: str) -> str:
    """The path as you can type it where the command was run."""
    relative = os.path.relpath(path, home)
    return str(path) if relative.startswith("..") else relative


def _sentence(training: GuardedTraining, pid: int) -> str:
    steps = sum(training.steps.values())
    who = f"your own guard: {training.model}" if training.own else training.model
    if training.pid != pid:
        who += f" (child process {training.pid})"
    if not training.reason and training.pid != pid:
        return f"{who} did not report how it ended; its record shows how far it got"
    text = f"{who}, {_several('step', steps)}"
    if len(training.steps) > 1:
        text += f" of {len(training.steps)} optimizers"
    if training.rejected:
        text += f", {_several('update', training.rejected)} kept out of the weights"
    if training.reason not in ("closed", "stopped", ""):
        text += f", ended by {training.reason}"
    if not training.codes:
        return f"{text}, no findings"
    named = [f"{name}{f' ({num}x)' if num > 1 else ''}" for name, num in list(training.codes.items())[:NUM_NAMED]]
    more = f" and {len(training.codes) - NUM_NAMED} more" if len(training.codes) > NUM_NAMED else ""
    return f"{text}; found {', '.join(named)}{more}"


def _several(what: str, num: int) -> str:
    return f"{num:,} {what}{'' if num == 1 else 's'}"


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num:,} times"
