"""SIGTERM and Ctrl-C ask for a checkpoint first: noted when they come, answered when the state is whole."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signalled(SystemExit):
    """The end of a process that a signal asked for; it knows the signal's name."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.reason = signal.Signals(number).name


def reason_of(error: BaseException) -> str:
    """Why a run ends that this ended, in a word: the name of a signal or of an exception."""
    return error.reason if isinstance(error, Signalled) else type(error).__name__


class SignalWatch:
    """Notes the first signal; the second one acts at once, as if nobody watched.

    A signal that is ignored (under `nohup`, in a background job) stays ignored.
    """

    def __init__(self) -> None:
        self.pending: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may handle signals: elsewhere they end the process as ever
        for number in SIGNALS:
            if signal.getsignal(number) in (signal.SIG_IGN, None):  # None: it is handled by something not in Python
                continue
            with contextlib.suppress(ValueError, OSError):
                self._before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.pending is not None:
            self.remove()
            self._deliver(number, frame)
        self.pending = number

    def answer(self) -> None:
        """The state is saved: let the signal do what it would have done."""
        number = self.pending
        if number is not None:
            self.remove()
            self._deliver(number, None)

    def _deliver(self, number: int, frame: FrameType | None) -> None:
        handler = self._before.get(number)
        if callable(handler):
            handler(number, frame)  # the program's own; for Ctrl-C Python's, which raises KeyboardInterrupt
        elif handler is not signal.SIG_IGN:
            raise Signalled(number)  # as if killed by it, but through the program's own clean-up

    def remove(self) -> None:
        """Give the signals back to whoever had them."""
        self.pending = None
        for number, handler in self._before.items():
            if handler is not None and signal.getsignal(number) == self._note:
                signal.signal(number, handler)
