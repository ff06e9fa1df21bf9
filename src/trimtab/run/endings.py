"""A signal that ends the program closes its records first, and then ends it as it would have without us.

The default action of SIGTERM ends a process at once, also one that hangs in a call that is not Python. A handler in
Python runs only when the main thread comes back from such a call. So the handler is only the bell: a thread that waits
at a pipe closes the records, puts the default action back and sends the signal again. The exit status is that of the
signal.

A program does not notice: asked for the handler, `signal` names the default action while ours is in its place, and a
handler that the program sets replaces ours. Nothing is installed before there is a record to close, nor over a signal
that is ignored or handled already; a forked child begins with the default actions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name))
LIMIT_S = 5.0
"""How long the end of the program waits for its records at most."""

_HERE: weakref.WeakSet[Endings] = weakref.WeakSet()
"""Those that forked children have to forget."""


class Endings:
    """Rings for `close(reason)` when a signal is about to end the process; `install` and `remove` can be repeated."""

    def __init__(self, close: Callable[[str], object]) -> None:
        self._close = close
        self._handler = self._arrived
        self._pid = 0
        self._pipe: tuple[int, int] | None = None
        self._over = threading.Event()
        self._default: Any = None
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Stand in for the default actions. Only the main thread can: elsewhere nothing happens."""
        if self._pid == os.getpid() or os.name != "posix" or threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        self._default = ctypes.CDLL(None).signal  # at the end it is too late to look for it
        self._default.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._pipe = reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._over = threading.Event()
        threading.Thread(target=self._wait, args=(reader,), name="trimtab-endings", daemon=True).start()
        self._hide()
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before != -1:  # somebody else waits there, an event loop say: the handler alone has to do
            signal.set_wakeup_fd(before)
        for number in SIGNALS:
            if _get(number) is signal.SIG_DFL:
                _set(number, self._handler)
        _forget_in_children()
        _HERE.add(self)

    def remove(self) -> None:
        """Give everything back."""
        if self._pid != os.getpid():
            return
        self._pid = 0
        _HERE.discard(self)
        if threading.current_thread() is threading.main_thread():
            self._give_back()
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"\0")  # the thread goes home, and closes the pipe

    def _give_back(self) -> None:
        for number in SIGNALS:
            if _get(number) is self._handler:
                _set(number, signal.SIG_DFL)
        before = signal.set_wakeup_fd(-1)
        if self._pipe is None or before != self._pipe[1]:
            signal.set_wakeup_fd(before)

    def forget(self) -> None:
        """In a forked child: the default actions are the real ones again, until it has a record of its own."""
        self._give_back()
        self._pid, self._pipe = 0, None

    # -- when a signal comes -------------------------------------------------------------------------------------

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, where the program goes no further."""
        if _get(number) is not self._handler:
            return  # the program has one of its own, and calls the one before it: that was none
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], bytes([number]))
            self._over.wait(LIMIT_S)
        self._end(number)

    def _wait(self, reader: int) -> None:
        pipe = self._pipe
        while True:
            data = os.read(reader, 1)
            if data in (b"", b"\0"):
                break
            if _get(data[0]) is self._handler:  # other signals ring here, too
                self._close_and_end(data[0])
        for end in pipe or ():
            with contextlib.suppress(OSError):
                os.close(end)

    def _close_and_end(self, number: int) -> NoReturn:
        try:
            self._close(signal.Signals(number).name)
        finally:
            self._end(number)

    def _end(self, number: int) -> NoReturn:
        """Not through Python, which would let only the main thread set a handler."""
        try:
            self._default(number, None)
            os.kill(os.getpid(), number)
        finally:
            self._over.set()
            os._exit(128 + number)

    # -- what the program sees -----------------------------------------------------------------------------------

    def _hide(self) -> None:
        if self._undo:
            return
        inner_set, inner_get = signal.signal, signal.getsignal

        @functools.wraps(inner_set)
        def set_handler(number: Any, handler: Any) -> Any:
            mine = handler is signal.SIG_DFL and number in SIGNALS and self._pid == os.getpid()
            before = inner_set(number, self._handler if mine else handler)
            return signal.SIG_DFL if before is self._handler else before

        @functools.wraps(inner_get)
        def get_handler(number: Any) -> Any:
            found = inner_get(number)
            return signal.SIG_DFL if found is self._handler else found

        self._undo += [_replaced("signal", set_handler), _replaced("getsignal", get_handler)]


_set, _get = signal.signal, signal.getsignal


def _replaced(name: str, function: Any) -> Callable[[], None]:
    inner = getattr(signal, name)
    setattr(signal, name, function)

    def undo() -> None:
        if getattr(signal, name) is function:
            setattr(signal, name, inner)

    return undo


@functools.cache  # it cannot be taken back, so once is enough
def _forget_in_children() -> None:
    """No signal reaches a child before its default actions are back: its bell would still ring in the parent."""
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if _HERE else None

    def unblock() -> None:
        if getattr(masks, "before", None) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def forget() -> None:
        for one in list(_HERE):
            with contextlib.suppress(ValueError):
                one.forget()
        _HERE.clear()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=forget)
