"""One guarded run of somebody's program, from its start to the last line on stderr."""

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
from trimtab.run.children import Commands, Exchange, at_child_end, guard_spawned, when_imported
from trimtab.run.endings import Endings
from trimtab.run.script import CannotStart, Program, run_program

if TYPE_CHECKING:
    from trimtab.run.auto_guard import Pilot
    from trimtab.run.guarded_training import Flight


STOPPED = 70
"""Exit code of a program that was stopped for the health of its training, and did not catch that itself."""
NUM_NAMED, NUM_TOLD = 4, 6

log = logging.getLogger("trimtab")


def fly(program: Program, settings: Mapping[str, Any], *, quiet: bool = False, as_json: bool = False) -> None:
    """Run the program under guard. Output, input and exit code are its own; our lines go to stderr."""
    crew = _Crew(settings, sys.stderr, quiet=quiet, as_json=as_json)
    when_imported("torch", crew.take_off)
    crew.watch_children()
    # First in, last out: what the program does in its own exit handlers, or in threads that outlive it, is guarded.
    atexit.register(crew.land)
    try:
        run_program(program)
    except CannotStart:
        crew.cancel()
        raise
    except TrainingStopped as stop:
        crew.land("stopped")
        crew.say(f"stopped for its health. {stop}")
        raise SystemExit(STOPPED) from None
    except Exception as error:
        crew.land(type(error).__name__)  # while it is being handled: what ended the run belongs in the record
        raise
    except SystemExit as end:
        crew.reason = getattr(end, "reason", crew.reason)  # one that a signal asked for says so
        raise
    except BaseException as end:
        crew.reason = type(end).__name__
        raise


def begin_child(begin: Mapping[str, Any]) -> None:
    """In a process that a guarded program spawned: guard what it trains, too. Costs nothing until it does."""
    crew = _Crew(begin["settings"], sys.stderr, quiet=begin["quiet"], as_json=False, home=begin["home"])
    crew.belong_to(Exchange(begin["folder"]))
    when_imported("torch", crew.wait_for_an_optimizer)


class _Crew:
    """What is said on stderr, and the pilot once there is PyTorch to fly with."""

    def __init__(
        self, settings: Mapping[str, Any], stream: TextIO, *, quiet: bool, as_json: bool, home: str | None = None
    ) -> None:
        self._settings, self._stream, self._quiet, self._as_json = settings, stream, quiet, as_json
        self._pilot: Pilot | None = None
        self._home = home or os.getcwd()
        self._flights: list[Flight] = []
        self._landing = threading.Lock()
        self._landed = self._is_child = self._awaited = False
        self._pid = os.getpid()
        self._exchange, self._commands, self._endings = Exchange(), Commands(), Endings(self._cut_short)
        self._undo: list[Callable[[], None]] = []
        self.reason = "closed"

    # -- the start -----------------------------------------------------------------------------------------------

    def take_off(self) -> None:
        """PyTorch is there: from here on every optimizer is seen. A failure of ours is said, and costs nothing else."""
        try:
            from trimtab.core.journal import Said
            from trimtab.record.sinks import ConsoleSink
            from trimtab.run.auto_guard import Pilot

            # Handlers run last in, first out: ours must come before that of the recorder, which was just imported.
            atexit.unregister(self.land)
            atexit.register(self.land)
            self._own_the_log()
            said = Said(self._exchange.is_first)
            sinks = list if self._quiet else (lambda: [ConsoleSink(stream=self._stream, said=said)])
            pilot = Pilot(self._settings, self._flights.append, sinks=sinks, begun=self._begun, forked=self._forked)
            pilot.take_off()
            self._pilot = pilot
        except Exception as error:
            self.say(f"cannot guard this program ({type(error).__name__}: {error}); it runs on without")

    def watch_children(self) -> None:
        """See processes being started: what they train is guarded as well, or they are named."""
        begin = {
            "settings": {k: v for k, v in self._settings.items() if k not in ("checkpoint", "resume")},
            "quiet": self._quiet,
            "home": self._home,
            "folder": str(self._exchange.folder),
        }
        self._undo += [guard_spawned(begin), self._commands.watch()]

    def wait_for_an_optimizer(self) -> None:
        """In a child, which may have nothing to train: begin when the first optimizer is built, or is there."""
        from torch.optim.optimizer import Optimizer

        from trimtab.torchutil.patch import wrap_attribute

        if any(issubclass(type(o), Optimizer) for o in gc.get_objects()):
            self.take_off()
            return
        undo: list[Callable[[], None]] = []

        def begin(name: str, inner: Callable[..., Any], this: Any, *args: Any, **kwargs: Any) -> Any:
            for put_back in undo:
                put_back()
            self.take_off()
            return getattr(Optimizer, name)(this, *args, **kwargs)

        names = ("__init__", "__setstate__")
        undo += [wrap_attribute(Optimizer, name, functools.partial(begin, name)) for name in names]

    def belong_to(self, exchange: Exchange) -> None:
        """This is a child: how it went is told to the first process."""
        self._exchange, self._is_child = exchange, True
        self.watch_children()

    def _forked(self) -> None:
        """In a forked child that begins to train: nothing of its parent's is its own to tell."""
        self._pid, self._is_child = os.getpid(), True
        self._landed = self._awaited = False
        self._flights.clear()
        self._landing, self._endings = threading.Lock(), Endings(self._cut_short)
        self.reason = "closed"

    def _begun(self, flights: list[Flight]) -> None:
        """There is a record now: it is to be closed whatever ends the process."""
        self._endings.install()
        if self._is_child:
            if not self._awaited:
                self._awaited = True
                at_child_end(self.land)
            self._exchange.tell([f.told() for f in (*self._flights, *flights)], begin=True)

    def _own_the_log(self) -> None:
        """The program's logging may go to its output, where nothing of ours belongs; findings are said by the sink."""
        handler = _Handler(self._stream)
        handler.setFormatter(logging.Formatter("trimtab: %(message)s"))
        log.addHandler(logging.NullHandler() if self._quiet else handler)
        log.setLevel(logging.WARNING)
        logging.getLogger(LINES_LOG).setLevel(logging.INFO)
        logging.getLogger(FINDINGS_LOG).setLevel(logging.CRITICAL + 1)  # the sink tells them, with their advice
        log.propagate = False

    # -- the end -------------------------------------------------------------------------------------------------

    def land(self, reason: str | None = None) -> None:
        """Complete every record, and say how it went; once."""
        if os.getpid() != self._pid or not self._landing.acquire(blocking=False):
            return
        if self._landed:
            self._landing.release()
            return
        self._landed = True
        try:
            if self._pilot is not None:
                self._pilot.land(reason or self.reason)
            self._endings.remove()
            for undo in self._undo:
                undo()
            self._tell()
        except Exception as error:  # an exit handler that raises would be heard of in the program's own output
            self.say(f"the end could not be told ({type(error).__name__}: {error})")
        finally:
            self._landing.release()

    def _cut_short(self, reason: str) -> None:
        """A signal is about to end the process: complete every record, without a look at anything that may hang."""
        if os.getpid() != self._pid:
            return
        landing, self._landed = self._landed, True
        from trimtab.record.recorder import close_all

        close_all(reason)
        if not landing:  # else the lines are being said already
            if self._pilot is not None:
                self._flights += self._pilot.flights
            self._tell()

    def _tell(self) -> None:
        flights = [f for f in self._flights if f.steps]  # one that never took off is nothing to tell of
        if self._is_child and self._exchange.tell([f.told() for f in flights], begin=False):
            return
        if not self._is_child and (told_by_others := self._exchange.collect()):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                from trimtab.run.guarded_training import Flight

                others = [Flight.from_told(data) for data in told_by_others]
                flights += [flight for flight in others if flight.steps or not flight.reason]
        if self._as_json:
            self._write(json.dumps({"schema_version": 1, "runs": [f.told() for f in flights]}) + "\n")
            return
        told = sorted(flights, key=lambda f: f.findings == 0)[:NUM_TOLD]  # the ones with findings first
        for flight in flights:
            if flight in told:
                self.say(_sentence(flight, self._pid))
                if flight.run_dir is not None:
                    self.say(f"  trimtab report {_short(flight.run_dir, self._home)}")
        if len(flights) > len(told):
            rest = len(flights) - len(told)
            num = sum(f.findings > 0 for f in flights if f not in told)
            self.say(f"and {rest} more trainings, {num} of them with findings; their records are beside these")
        if not flights:
            for line in self._nothing():
                self.say(line)

    def _nothing(self) -> Iterator[str]:
        """What was seen, where nothing was guarded."""
        seen = None if self._pilot is None else self._pilot.seen
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
        """There was nothing to run, and so there is nothing to tell."""
        self._landed = True

    def say(self, text: str) -> None:
        """Something of ours: every line of it says whose it is."""
        if not self._quiet:
            self._write("".join(f"trimtab: {line}\n" for line in text.splitlines()))

    def _write(self, text: str) -> None:
        """The program may have closed the stream, or another thread may be stuck in it."""
        with contextlib.suppress(ValueError, OSError):
            if threading.current_thread() is threading.main_thread():
                self._stream.write(text)
                self._stream.flush()
            else:
                os.write(self._stream.fileno(), text.encode("utf-8", "replace"))


class _Handler(logging.StreamHandler[TextIO]):
    """Says nothing of a stream that the program has closed."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Not into the program's output."""


def _short(path: Path, home: str) -> str:
    """The path as it can be typed where the command was."""
    relative = os.path.relpath(path, home)
    return str(path) if relative.startswith("..") else relative


def _sentence(flight: Flight, pid: int) -> str:
    steps = sum(flight.steps.values())
    who = f"your own guard: {flight.model}" if flight.own else flight.model
    if flight.pid != pid:
        who += f" (child process {flight.pid})"
    if not flight.reason and flight.pid != pid:
        return f"{who} did not tell how it ended; its record says how far it came"
    told = f"{who}, {_several('step', steps)}"
    if len(flight.steps) > 1:
        told += f" of {len(flight.steps)} optimizers"
    if flight.rejected:
        told += f", {_several('update', flight.rejected)} kept out of the weights"
    if flight.reason not in ("closed", "stopped", ""):
        told += f", ended by {flight.reason}"
    if not flight.codes:
        return f"{told}, no findings"
    named = [f"{name}{f' ({num}x)' if num > 1 else ''}" for name, num in list(flight.codes.items())[:NUM_NAMED]]
    more = f" and {len(flight.codes) - NUM_NAMED} more" if len(flight.codes) > NUM_NAMED else ""
    return f"{told}; found {', '.join(named)}{more}"


def _several(what: str, num: int) -> str:
    return f"{num:,} {what}{'' if num == 1 else 's'}"


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num:,} times"
