"""One sink, its queue and its thread: whatever the sink does stays in here."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from trimtab.core.types import Record, Sample, Sink, Verdict

log = logging.getLogger("trimtab.record")

MAX_FAILURES = 20
"""Consecutive failures after which a sink is switched off."""

MAX_BACKLOG = 100_000
"""Findings are never dropped, but a sink that lets this many records pile up is switched off."""


class Mark:
    """Travels among the records; a outlet that has written everything before it says so in `reached`."""

    def __init__(self) -> None:
        self.reached: SimpleQueue[None] = SimpleQueue()


class Outlet:
    """Feeds one sink from a bounded queue on a daemon thread that starts with the first batch."""

    def __init__(self, name: str, sink: Sink, size: int) -> None:
        self.name = name
        self.num_dropped = 0
        self.failure = ""
        self._sink = sink
        self._size = size
        self._queue: deque[Record | Mark] = deque()
        self._lock = threading.Lock()  # never held while the sink works
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._stopping = False
        self._off = False
        self._num_failures = 0
        self._streaks = {"write": 0, "flush": 0, "close": 0}
        self._thread: threading.Thread | None = None

    def offer(self, batch: Sequence[Record | Mark]) -> None:
        """Queue a batch; beyond the size the oldest samples go, and verdicts that found nothing."""
        with self._lock:
            if self._off:
                self.num_dropped += sum(not isinstance(record, Mark) for record in batch)
                batch = [record for record in batch if isinstance(record, Mark)]
            self._queue.extend(batch)
            if len(self._queue) > self._size:
                self._shrink()
        self._wake()

    def stop(self) -> None:
        """Close the sink once the queue is empty."""
        self._stopping = True
        self._wake()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it did not."""
        if self._thread is None:
            return self._off
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._run, name=f"trimtab-{self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                if not self._off:
                    self._switch_off(str(error))
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
        self._queue = kept
        if len(kept) > max(self._size, MAX_BACKLOG) and not self._off:
            self._switch_off(f"{len(kept)} records are waiting for it")
            self.num_dropped += len(kept)
            kept.clear()

    def _take(self) -> Record | Mark | None:
        with self._lock:
            return self._queue.popleft() if self._queue else None

    def _run(self) -> None:
        stopping = False
        while not stopping:
            self._bell.get()
            stopping = self._stopping  # read before emptying the queue: what came before `stop` is written
            dirty = False
            while (record := self._take()) is not None:
                if isinstance(record, Mark):
                    self._flush()
                    dirty = False
                    record.reached.put(None)
                elif self._off:
                    with self._lock:  # the pump counts, too
                        self.num_dropped += 1
                else:
                    dirty = True
                    self._guard("write", lambda r=record: self._sink.write(r))  # type: ignore[misc]
            if dirty:
                self._flush()
        self._guard("close", self._sink.close)

    def _flush(self) -> None:
        flush = getattr(self._sink, "flush", None)
        if callable(flush) and not self._off:
            self._guard("flush", flush)

    def _guard(self, what: str, call: Callable[[], object]) -> None:
        """Call into the sink; nothing it raises, SystemExit included, leaves this thread."""
        try:
            call()
        except BaseException as error:
            self._failed(what, error)
        else:
            self._streaks[what] = 0  # each its own: a sink that collects well may still never get it to the disk

    def _failed(self, what: str, error: BaseException) -> None:
        self._num_failures += 1
        self._streaks[what] += 1
        text = f"{type(error).__name__}: {error}"
        times = f" ({self._num_failures} times)" if self._num_failures > 1 else ""
        self.failure = f"{what} failed with {text}{times}"
        if self._num_failures == 1:
            log.warning(
                "sink %r: %s failed with %s; it is tried again with the next records, training goes on",
                self.name,
                what,
                text,
            )
        if self._streaks[what] >= MAX_FAILURES and not self._off:
            self._switch_off(f"{what} failed {MAX_FAILURES} times in a row, last with {text}")

    def _switch_off(self, why: str) -> None:
        self._off = True
        self.failure = f"switched off: {why}"
        log.warning("sink %r is switched off: %s; training goes on", self.name, why)
