"""Hands records from the training thread to sinks without ever making it wait.

`put` appends to one deque, nothing else. A pump thread empties it every `flush_s` seconds (at once for what a person
wants to see now) into one outlet per sink; each outlet has its own thread, so a sink that hangs holds up neither
training nor its neighbours. What a signal handler or Ctrl-C can interrupt (`put`) touches only C-level containers
that need no lock.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from trimtab.core.collected import when_collected
from trimtab.core.types import Closing, Outcome, Record, Sink, Verdict
from trimtab.record.outlet import Mark, Outlet
from trimtab.record.writer import complete_all

log = logging.getLogger("trimtab.record")

_EXIT_TIMEOUT_S = 2.0
_START_PAUSE_S, _MAX_INBOX = 1.0, 10_000
FLUSH_S = 0.1
"""How often records are handed over. A process that is killed loses what came after the last time."""


class _Core:
    """Everything the threads need; it does not know its Recorder, so that one can be collected."""

    def __init__(self, outlets: list[Outlet], flush_s: float) -> None:
        self.outlets = outlets
        self.flush_s = flush_s
        self.pid = os.getpid()
        self.inbox: deque[Record | Mark] = deque()
        self.bell: SimpleQueue[None] = SimpleQueue()  # not an Event: Ctrl-C inside Event.set can leave its lock held
        self.closed = False
        self.start_at_s = 0.0
        self.pump: threading.Thread | None = None
        self.turn = threading.Lock()  # taken by pump threads only

    def start(self) -> None:
        """Start the pump; if Ctrl-C comes just here a second one may follow, and `turn` makes that harmless."""
        if time.monotonic() < self.start_at_s:
            self._wait_for_the_pump()
            return
        pump = threading.Thread(target=self._run, name="trimtab-pump", daemon=True)
        try:
            pump.start()
        except RuntimeError as error:  # no more threads just now, or the interpreter is going down
            if self.start_at_s == 0.0:
                log.warning("records are not written (%s); it is tried again, training goes on", error)
            self.start_at_s = time.monotonic() + _START_PAUSE_S
            return
        self.pump = pump
        for core in list(_LIVE):
            if core.closed and not core.is_alive:
                _LIVE.discard(core)
        _LIVE.add(self)

    @property
    def is_alive(self) -> bool:
        """Whether any of its threads is at work."""
        return any(t is not None and t.is_alive() for t in (self.pump, *(outlet.thread for outlet in self.outlets)))

    def _wait_for_the_pump(self) -> None:
        """Nobody empties the inbox: what does not fit it goes, the oldest first."""
        while len(self.inbox) > _MAX_INBOX:
            with contextlib.suppress(IndexError):
                self.inbox.popleft()
            for outlet in self.outlets:
                outlet.num_dropped += 1

    def stop(self, reason: str = "closed") -> None:
        """Let the threads finish what was put so far and end; does not wait."""
        if not self.closed:
            for outlet in self.outlets:
                outlet.end(reason)
        self.closed = True
        self.bell.put(None)

    def _run(self) -> None:
        while True:
            with contextlib.suppress(Empty):
                self.bell.get(timeout=self.flush_s)
            last = self.closed  # read before emptying: nothing that was put before `stop` is left behind
            with self.turn:
                self._distribute()
                if last:
                    for outlet in self.outlets:
                        outlet.stop()
                    return

    def _distribute(self) -> None:
        batch: list[Record | Mark] = []
        try:
            while True:
                batch.append(self.inbox.popleft())
        except IndexError:
            pass
        if batch:
            for outlet in self.outlets:
                outlet.offer(batch)

    def wait(self, timeout_s: float) -> None:
        """Wait for the threads to end, at most this long; name the sinks that did not."""
        deadline = time.monotonic() + timeout_s
        if self.pump is not None:
            self.pump.join(timeout_s)
        for outlet in self.outlets:
            if not outlet.wait(max(0.0, deadline - time.monotonic())):
                log.warning(
                    "sink %r did not finish within %g s and was abandoned; its last records are lost",
                    outlet.name,
                    timeout_s,
                )
        _LIVE.discard(self)


_LIVE: set[_Core] = set()
"""Cores with threads: kept here until closed, because a daemon thread ends mid-write with the interpreter."""


def close_all(reason: str = "closed", timeout_s: float = _EXIT_TIMEOUT_S) -> None:
    """Complete every record of this process; those that nobody closed say that they ended for this reason."""
    mine = [core for core in list(_LIVE) if core.pid == os.getpid()]
    for core in mine:
        core.stop(reason)
    for core in mine:
        core.wait(timeout_s)
    # What a signal or Ctrl-C left before there was anybody to write to it. Not what somebody is still stuck in.
    complete_all(reason, [outlet.sink for core in mine for outlet in core.outlets])


def wait_for_finished(timeout_s: float = _EXIT_TIMEOUT_S) -> None:
    """Wait for the records that were told to finish: what they hold is complete then."""
    for core in list(_LIVE):
        if core.pid == os.getpid() and core.closed:
            core.wait(timeout_s)


@atexit.register
def _close_at_exit() -> None:
    """Complete every record after Ctrl-C, sys.exit or an exception, also where nobody called close()."""
    error = getattr(sys, "last_value", None)  # what ended the program, if anything did
    close_all("closed" if error is None else type(error).__name__)


class Recorder:
    """Gives every record to every sink, on threads of their own.

    `put` never blocks and never raises. A sink that raises is reported once and tried again; one that is too slow
    loses its oldest samples (see `dropped`), never findings. In a forked child everything is a no-op.

    Example:
        >>> from trimtab.core.types import Outcome, Action
        >>> class Keep:
        ...     def write(self, record): self.last = record
        ...     def close(self): pass
        >>> keep = Keep()
        >>> recorder = Recorder([("keep", keep)])
        >>> recorder.put(Outcome(at=7, action=Action(kind="cut_lr"), applied=True))
        >>> recorder.close()
        >>> keep.last.at
        7
    """

    def __init__(
        self, sinks: Sequence[tuple[str, Sink]], *, flush_s: float = FLUSH_S, queue_size: int = 10_000
    ) -> None:
        names: Counter[str] = Counter()
        outlets = []
        for name, sink in sinks:
            names[name] += 1
            unique = name if names[name] == 1 else f"{name} {names[name]}"
            outlets.append(Outlet(unique, sink, queue_size))
        self._core = _Core(outlets, flush_s)
        self._append = self._core.inbox.append
        self._pid = self._core.pid
        # If it is dropped without close(), the threads finish by themselves; at exit _close_all waits for them.
        when_collected(self, self._core.stop)

    def put(self, record: Record) -> None:
        """Hand over one record; costs about a microsecond whatever the sinks do."""
        core = self._core
        if core.closed or os.getpid() != self._pid:
            return
        self._append(record)
        if core.pump is None:
            core.start()
        if record.__class__ in _MAY_BE_URGENT and (record.__class__ is not Verdict or record.findings):
            core.bell.put(None)

    def flush(self, timeout_s: float = 2.0) -> bool:
        """Wait until every sink has everything put so far; False if one did not within the time."""
        core = self._core
        if core.closed or os.getpid() != self._pid or core.pump is None:
            return True
        mark = Mark()
        self._append(mark)
        core.bell.put(None)
        deadline = time.monotonic() + timeout_s
        try:
            for _ in core.outlets:
                mark.reached.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return False
        return True

    def finish(self, reason: str = "closed") -> None:
        """Let the sinks write what is left and close by themselves; does not wait, at exit that is done.

        Where no `Closing` was put, the record says that it ended for this reason.
        """
        if os.getpid() == self._pid and not self._core.closed and self._core.pump is not None:
            self._core.stop(reason)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what is left and close every sink; one that hangs is abandoned after `timeout_s` seconds."""
        core = self._core
        if os.getpid() != self._pid or (core.closed and core not in _LIVE):
            return
        if core.pump is None:
            core.start()  # sinks are closed on their own threads even if nothing was put: closing can hang, too
            if core.pump is None:
                core.closed = True
                return
        core.stop()
        core.wait(timeout_s)

    @property
    def dropped(self) -> Counter[str]:
        """How many records each sink lost, by name; only sinks that lost any."""
        return Counter({outlet.name: outlet.num_dropped for outlet in self._core.outlets if outlet.num_dropped})

    @property
    def failures(self) -> dict[str, str]:
        """What went wrong in each sink, by name; only sinks in which something did."""
        return {outlet.name: outlet.failure for outlet in self._core.outlets if outlet.failure}


_MAY_BE_URGENT = frozenset({Verdict, Outcome, Closing})
