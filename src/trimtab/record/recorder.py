"""Hands records from the training thread to sinks without making it wait; what a sink does stays in its thread."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from trimtab.core.contain import when_collected
from trimtab.core.types import Closing, Outcome, Record, Sample, Sink, Verdict
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
        """Wait for the threads to end, at most this long; name the sinks that did not, and what was lost.

        A sink that hands over more than records at its end says how long that may take, in `patience_s`.
        """
        began_s = time.monotonic()
        if self.pump is not None:
            self.pump.join(timeout_s)
        for outlet in self.outlets:
            ended = outlet.wait(max(0.0, began_s + timeout_s - time.monotonic()))
            allowed_s = timeout_s
            if not ended and outlet.closing:  # it has every record: what it does now is worth waiting for
                allowed_s = max(timeout_s, float(getattr(outlet.sink, "patience_s", 0.0)))
                ended = outlet.wait(max(0.0, began_s + allowed_s - time.monotonic()))
            if not ended:
                log.warning(
                    "sink %r did not finish within %g s and was abandoned; its last records are lost",
                    outlet.name,
                    allowed_s,
                )
            elif self in _LIVE and outlet.num_lost:
                log.warning("sink %r: %d records did not reach it in all", outlet.name, outlet.num_lost)
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
    """Wait for the records that are being closed: they are complete then."""
    for core in list(_LIVE):
        if core.pid == os.getpid() and core.closed:
            core.wait(timeout_s)


@atexit.register
def close_at_exit() -> None:
    """Complete every record after Ctrl-C, sys.exit or an exception, also where nobody called close().

    What must end after the records are complete calls it first: functions for the exit run in the reverse order.
    """
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
        return Counter({outlet.name: outlet.num_lost for outlet in self._core.outlets if outlet.num_lost})

    @property
    def failures(self) -> dict[str, str]:
        """What went wrong in each sink, by name; only sinks in which something did."""
        return {outlet.name: outlet.failure for outlet in self._core.outlets if outlet.failure}


_MAY_BE_URGENT = frozenset({Verdict, Outcome, Closing})


MAX_FAILURES = 20
"""Writes that fail in a row before a sink gets a pause: one record that it cannot take need not hold up the next."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0

MAX_BACKLOG = 100_000
"""Findings are not dropped for their number, but a sink that lets this many records pile up loses them all."""


class Mark:
    """Travels among the records; an outlet that has written everything before it says so in `reached`."""

    def __init__(self) -> None:
        self.reached: SimpleQueue[None] = SimpleQueue()


class _Trouble:
    """How long one thing that a sink does has been failing, and when to try it again."""

    def __init__(self) -> None:
        self.in_a_row = self.num_pauses = 0
        self.until_s = 0.0

    @property
    def pausing(self) -> bool:
        """Whether it is not to be tried now."""
        return time.monotonic() < self.until_s

    def pause(self) -> None:
        """Wait twice as long as the last time."""
        self.until_s = time.monotonic() + min(FIRST_PAUSE_S * 2.0**self.num_pauses, LONGEST_PAUSE_S)
        self.num_pauses = min(self.num_pauses + 1, 30)

    def over(self) -> None:
        """It went well."""
        self.in_a_row = self.num_pauses = 0
        self.until_s = 0.0


class Outlet:
    """Feeds one sink from a bounded queue on a daemon thread that starts with the first batch."""

    def __init__(self, name: str, sink: Sink, size: int) -> None:
        self.name = name
        self.num_dropped = 0
        self.failure = ""
        self.closing = False  # whether the sink has every record
        self.sink = sink
        self._size = size
        self._queue: deque[Record | Mark] = deque()
        self._lock = threading.Lock()  # never held while the sink works
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._stopping = self._unwritten = False
        self._num_failures = 0
        self._troubles = {"write": _Trouble(), "flush": _Trouble(), "close": _Trouble()}
        self._down_since_s: float | None = None
        self._dropped_before = 0
        self._thread: threading.Thread | None = None

    def offer(self, batch: Sequence[Record | Mark]) -> None:
        """Queue a batch; beyond the size the oldest samples go, and verdicts that found nothing."""
        with self._lock:
            self._queue.extend(batch)
            if len(self._queue) > self._size:
                self._shrink()
        self._wake()

    def stop(self) -> None:
        """Close the sink once the queue is empty."""
        self._stopping = True
        self._wake()

    def end(self, reason: str) -> None:
        """Tell the sink why the run ends, if it wants to know."""
        end = getattr(self.sink, "end", None)
        if callable(end):
            end(reason)

    @property
    def num_lost(self) -> int:
        """How many records were dropped before the sink, or given up by it."""
        return self.num_dropped + int(getattr(self.sink, "num_lost", 0))

    @property
    def thread(self) -> threading.Thread | None:
        """The thread, once there is one."""
        return self._thread

    def wait(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it did not."""
        if self._thread is None:
            return bool(self.failure)  # no thread could be had: there is nothing to wait for
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"trimtab-{self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self.failure:
                    self.failure = f"not written: {error}"
                    log.warning("sink %r is not written (%s); training goes on", self.name, error)
                return
            self._thread = thread
        self._bell.put(None)

    def _shrink(self) -> None:
        excess = len(self._queue) - self._size
        kept: deque[Record | Mark] = deque()
        for record in self._queue:
            if excess > 0 and (isinstance(record, Sample) or getattr(record, "may_be_dropped", False)):
                excess -= 1
                self.num_dropped += 1
            elif excess > 0 and isinstance(record, Verdict) and not record.findings:
                excess -= 1
            else:
                kept.append(record)
        if len(kept) > max(self._size, MAX_BACKLOG):
            marks = [record for record in kept if isinstance(record, Mark)]
            self.num_dropped += len(kept) - len(marks)
            self.failure = f"lost {len(kept) - len(marks)} records that were waiting for it"
            log.warning("sink %r %s; training goes on", self.name, self.failure)
            kept = deque(marks)
        self._queue = kept

    def _take(self) -> Record | Mark | None:
        """The next record; in a pause only marks, because somebody waits for them."""
        with self._lock:
            if self._troubles["write"].pausing:
                marks = [record for record in self._queue if isinstance(record, Mark)]
                if marks:
                    self._queue.remove(marks[0])
                return marks[0] if marks else None
            return self._queue.popleft() if self._queue else None

    def _run(self) -> None:
        stopping = False
        while not stopping:
            self._listen()
            stopping = self._stopping  # read before emptying the queue: what came before `stop` is written
            while (record := self._take()) is not None:
                if isinstance(record, Mark):
                    self._flush()
                    record.reached.put(None)
                    continue
                self._unwritten = True
                if not self._guard("write", lambda r=record: self.sink.write(r)):  # type: ignore[misc]
                    with self._lock:  # the pump counts, too
                        self.num_dropped += 1
            if self._unwritten and not self._troubles["flush"].pausing:
                self._flush()
        self.closing = True
        self._guard("close", self.sink.close)
        if self._queue or self._troubles["close"].in_a_row:
            self.num_dropped += len(self._queue)
            log.warning("sink %r could not be completed: %s", self.name, self.failure)

    def _listen(self) -> None:
        """Wait for records, for the end, or for the end of a pause."""
        ends = [t.until_s for t in self._troubles.values() if t.until_s > 0.0]
        try:
            self._bell.get(timeout=max(0.0, min(ends) - time.monotonic()) if ends else None)
        except Empty:
            for trouble in self._troubles.values():
                if trouble.until_s <= time.monotonic():
                    trouble.until_s = 0.0

    def _flush(self) -> None:
        flush = getattr(self.sink, "flush", None)
        self._unwritten = callable(flush) and not self._guard("flush", flush)

    def _guard(self, what: str, call: Callable[[], object]) -> bool:
        """Call into the sink; nothing it raises, SystemExit included, leaves this thread. False where it raised."""
        try:
            call()
        except BaseException as error:
            self._failed(what, error)
            return False
        self._troubles[what].over()  # each its own: a sink that collects well may still never get it to the disk
        if self._down_since_s is not None and not any(t.in_a_row for t in self._troubles.values()):
            self._works_again(time.monotonic() - self._down_since_s)
        return True

    def _failed(self, what: str, error: BaseException) -> None:
        self._num_failures += 1
        trouble = self._troubles[what]
        trouble.in_a_row += 1
        text = f"{type(error).__name__}: {error}"
        times = f" ({self._num_failures} times)" if self._num_failures > 1 else ""
        self.failure = f"{what} failed with {text}{times}"
        if self._down_since_s is None:
            self._down_since_s, self._dropped_before = time.monotonic(), self.num_dropped
            if self._num_failures == 1:
                log.warning("sink %r: %s failed with %s; it is tried again, training goes on", self.name, what, text)
        if what == "flush" or trouble.in_a_row >= MAX_FAILURES:
            trouble.pause()

    def _works_again(self, down_s: float) -> None:
        """Said once it matters: not after every record that a sink could not take."""
        self._down_since_s = None
        lost = self.num_dropped - self._dropped_before
        if down_s >= 1.0 or lost > 1:
            log.warning("sink %r works again after %.1f s; %d records did not reach it", self.name, down_s, lost)
