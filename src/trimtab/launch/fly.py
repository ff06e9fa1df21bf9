"""One guarded run of somebody's program, from take-off to the last line on stderr."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from trimtab.core.errors import TrainingStopped
from trimtab.launch.imports import when_imported
from trimtab.launch.script import CannotStart, Program, run_program

if TYPE_CHECKING:
    from trimtab.launch.pilot import Pilot
    from trimtab.launch.tally import Flight

STOPPED = 70
"""Exit code of a program that was stopped for the health of its training, and did not catch that itself."""
NUM_NAMED, NUM_TOLD = 4, 6

log = logging.getLogger("trimtab")


def fly(program: Program, settings: Mapping[str, Any], *, quiet: bool = False, as_json: bool = False) -> None:
    """Run the program under guard. Output, input and exit code are its own; our lines go to stderr."""
    crew = _Crew(settings, sys.stderr, quiet=quiet, as_json=as_json)
    when_imported("torch", crew.take_off)
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


class _Crew:
    """What is said on stderr, and the pilot once there is PyTorch to fly with."""

    def __init__(self, settings: Mapping[str, Any], stream: TextIO, *, quiet: bool, as_json: bool) -> None:
        self._settings, self._stream, self._quiet, self._as_json = settings, stream, quiet, as_json
        self._pilot: Pilot | None = None
        self._home = os.getcwd()
        self._flights: list[Flight] = []
        self._landed = False

    def take_off(self) -> None:
        """PyTorch is there: from here on every optimizer is seen. A failure of ours is said, and costs nothing else."""
        try:
            from trimtab.launch.pilot import Pilot
            from trimtab.record.sinks import ConsoleSink

            # Handlers run last in, first out: ours must come before that of the recorder, which was just imported.
            atexit.unregister(self.land)
            atexit.register(self.land)
            self._own_the_log()
            sinks = [] if self._quiet else [ConsoleSink(stream=self._stream)]
            pilot = Pilot({**self._settings, "sinks": [*self._settings.get("sinks", ()), *sinks]}, self._flights.append)
            pilot.take_off()
            self._pilot = pilot
        except Exception as error:
            self.say(f"cannot guard this program ({type(error).__name__}: {error}); it runs on without")

    def _own_the_log(self) -> None:
        """The program's logging may go to its output, where nothing of ours belongs; findings are said by the sink."""
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(logging.Formatter("trimtab: %(message)s"))
        handler.addFilter(lambda record: not self._quiet and _is_to_be_said(record))
        log.addHandler(handler)
        if self._settings["config"].preset is not None:
            log.setLevel(logging.INFO)  # a preset may ask for lines of its own
        log.propagate = False

    def land(self, reason: str = "closed") -> None:
        """Complete every record, and say how it went; once."""
        if self._landed:
            return
        self._landed = True
        if self._pilot is not None:
            self._pilot.land(reason)
        self._flights = [f for f in self._flights if f.steps]  # one that never took off is nothing to tell of
        if self._as_json:
            self._stream.write(json.dumps({"schema_version": 1, "runs": [f.told() for f in self._flights]}) + "\n")
            return
        told = sorted(self._flights, key=lambda f: f.findings == 0)[:NUM_TOLD]  # the ones with findings first
        for flight in self._flights:
            if flight in told:
                self.say(_sentence(flight))
                if flight.run_dir is not None:
                    self.say(f"  trimtab report {_short(flight.run_dir, self._home)}")
        if len(self._flights) > len(told):
            rest = len(self._flights) - len(told)
            num = sum(f.findings > 0 for f in self._flights if f not in told)
            self.say(f"and {rest} more trainings, {num} of them with findings; their records are beside these")
        if not self._flights:
            self.say("no PyTorch optimizer was stepped; there was nothing to guard")

    def cancel(self) -> None:
        """There was nothing to run, and so there is nothing to tell."""
        self._landed = True

    def say(self, text: str) -> None:
        """Something of ours: every line of it says whose it is."""
        if not self._quiet:
            self._stream.write("".join(f"trimtab: {line}\n" for line in text.splitlines()))
            self._stream.flush()


def _is_to_be_said(record: logging.LogRecord) -> bool:
    """Warnings, but not findings, which the sink tells with their advice; and the lines of a preset."""
    return record.module != "guard" and (record.levelno >= logging.WARNING or record.module == "line_sink")


def _short(path: Path, home: str) -> str:
    """The path as it can be typed where the command was."""
    relative = os.path.relpath(path, home)
    return str(path) if relative.startswith("..") else relative


def _sentence(flight: Flight) -> str:
    steps = sum(flight.steps.values())
    told = f"{flight.model}, {steps:,} step{'' if steps == 1 else 's'}"
    if len(flight.steps) > 1:
        told += f" of {len(flight.steps)} optimizers"
    if flight.rejected:
        told += f", {flight.rejected:,} update{'' if flight.rejected == 1 else 's'} kept out of the weights"
    if not flight.codes:
        return f"{told}, no findings"
    named = [f"{name}{f' ({num}x)' if num > 1 else ''}" for name, num in list(flight.codes.items())[:NUM_NAMED]]
    more = f" and {len(flight.codes) - NUM_NAMED} more" if len(flight.codes) > NUM_NAMED else ""
    return f"{told}; found {', '.join(named)}{more}"
