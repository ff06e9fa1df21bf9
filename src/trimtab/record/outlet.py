"""One sink, its queue and its thread: whatever the sink does stays in here.

A sink that fails is tried again, after a pause that doubles up to a limit: a disk that is full or a network that is
down for a while costs what does not fit the queue meanwhile, and not the rest of the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

from trimtab.core.types import Record, Sample, Sink, Verdict

log = logging.getLogger("trimtab.record")

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
        tell = getattr(self.sink, "end", None)
        if callable(tell):
            tell(reason)

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
            if excess > 0 and isinstance(record, Sample):
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
