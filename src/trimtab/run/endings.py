"""Closes the records when a signal or `os._exit` ends the program, which then ends as it would have without trimtab.

The default action of SIGTERM ends a process at once, also one that hangs in a call that is not Python. A handler in
Python runs only when the main thread returns from such a call. So the handler only writes to a pipe: a thread that
reads it closes the records, restores the default action and sends the signal again. The exit status is that of the
signal.

The program does not notice: `signal.getsignal` returns the default action while our handler is installed, and a handler
that the program sets replaces ours. Nothing is installed before there is a record to close, nor over a signal that is
ignored or handled already. A forked child begins with the default actions.

`os._exit` calls no exit handler, and what a thread has still to write is lost: the records are closed before it.
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
from types import FrameType, ModuleType
from typing import NoReturn, ParamSpec, TypeVar

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGINT") if hasattr(signal, name))
LIMIT_S = 5.0
"""How long the end of the program waits for its records at most."""

Handler = Callable[[int, FrameType | None], object] | int | signal.Handlers | None
P = ParamSpec("P")
R = TypeVar("R")


class Endings:
    """Calls `close(reason)` when a signal or `os._exit` is about to end the process; can be installed repeatedly."""

    def __init__(self, close: Callable[[str], object]) -> None:
        self._close = close
        self._handler = self._arrived
        self._pid = 0
        self._pipe: tuple[int, int] | None = None
        self._over = threading.Event()
        self._reset: Callable[[int], object] = lambda number: None
        self._forgets_in_children = False
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Replace the default actions. Only the main thread can: elsewhere nothing happens."""
        if self._pid == os.getpid() or os.name != "posix" or threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        set_action = ctypes.CDLL(None).signal  # when a signal comes it is too late to look it up
        set_action.argtypes = [ctypes.c_int, ctypes.c_void_p]
        self._reset = lambda number: set_action(number, None)
        self._pipe = reader, writer = os.pipe()
        os.set_blocking(writer, False)
        self._over = threading.Event()
        threading.Thread(target=self._wait, args=(reader,), name="trimtab-endings", daemon=True).start()
        self._hide()
        before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        if before != -1:  # an event loop uses it: only the handler is installed then
            signal.set_wakeup_fd(before)
        for number in SIGNALS:
            if _get(number) is signal.SIG_DFL:
                _set(number, self._handler)
        self._forget_in_children()

    def remove(self) -> None:
        """Restore everything."""
        if self._pid != os.getpid():
            return
        self._pid = 0
        if threading.current_thread() is threading.main_thread():
            self._give_back()
        for undo in self._undo:
            undo()
        self._undo.clear()
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                os.write(self._pipe[1], b"\0")  # the thread ends, and closes the pipe

    def _give_back(self) -> None:
        for number in SIGNALS:
            if _get(number) is self._handler:
                _set(number, signal.SIG_DFL)
        before = signal.set_wakeup_fd(-1)
        if self._pipe is None or before != self._pipe[1]:
            signal.set_wakeup_fd(before)

    def forget(self) -> None:
        """In a forked child: restore the default actions until it has a record of its own."""
        self._give_back()
        self._pid, self._pipe = 0, None

    # -- when a signal comes -------------------------------------------------------------------------------------

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, where the program stops here."""
        if _get(number) is not self._handler:
            return  # called by a handler of the program's own, which replaced ours
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
            if _get(data[0]) is self._handler:  # other signals arrive here, too
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
        """End the process by the signal. Python would let only the main thread reset the handler."""
        try:
            self._reset(number)
            os.kill(os.getpid(), number)
        finally:
            self._over.set()
            _exit_at_once(128 + number)

    # -- what the program sees -----------------------------------------------------------------------------------

    def _hide(self) -> None:
        if self._undo:
            return
        inner_set, inner_get = signal.signal, signal.getsignal

        @functools.wraps(inner_set)
        def set_handler(number: int, handler: Handler) -> Handler:
            mine = handler is signal.SIG_DFL and number in SIGNALS and self._pid == os.getpid()
            before = inner_set(number, self._handler if mine else handler)
            return signal.SIG_DFL if before is self._handler else before

        @functools.wraps(inner_get)
        def get_handler(number: int) -> Handler:
            found = inner_get(number)
            return signal.SIG_DFL if found is self._handler else found

        @functools.wraps(_exit_at_once)
        def exit_at_once(status: int) -> NoReturn:
            if self._pid == os.getpid():
                # In a thread of its own: a record that cannot be closed must not keep the program from ending.
                closing = threading.Thread(target=self._close, args=("os._exit",), daemon=True)
                closing.start()
                closing.join(LIMIT_S)
            _exit_at_once(status)

        self._undo += [
            _replaced(signal, "signal", set_handler),
            _replaced(signal, "getsignal", get_handler),
            _replaced(os, "_exit", exit_at_once),
        ]

    def _forget_in_children(self) -> None:
        """Let no signal reach a forked child before its default actions are back: our pipe leads to the parent."""
        if self._forgets_in_children:
            return
        self._forgets_in_children = True  # what is registered below cannot be removed again
        me, masks = weakref.ref(self), threading.local()

        def block() -> None:
            one = me()
            installed = one is not None and one._pid == os.getpid()
            masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS) if installed else None

        def unblock() -> None:
            if getattr(masks, "before", None) is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

        def forget() -> None:
            one = me()
            if one is not None and one._pid:
                with contextlib.suppress(ValueError):
                    one.forget()
            unblock()

        os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=forget)


_set, _get = signal.signal, signal.getsignal
_exit_at_once = os._exit


def _replaced(module: ModuleType, name: str, function: Callable[..., object]) -> Callable[[], None]:
    inner = getattr(module, name)
    setattr(module, name, function)

    def undo() -> None:
        if getattr(module, name) is function:
            setattr(module, name, inner)

    return undo
