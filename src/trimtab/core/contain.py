"""What must not reach training: failures of ours are reported once, and the end of an object is reported safely."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

from trimtab.core.errors import TrimtabError

log = logging.getLogger("trimtab")


class Contained:
    """Calls things that must not break a training run. Each kind of failure is reported once, with its traceback."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def call(self, what: str, function: Callable[..., Any], *args: object, default: object = None) -> Any:
        """`function(*args)`, or `default` if it raises. Errors that trimtab raises on purpose pass through."""
        try:
            return function(*args)
        except TrimtabError:
            raise
        except Exception as error:
            self.report(what, error)
            return default

    def hook(self, what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that PyTorch calls inside the user's forward or backward: whatever happens in it, it never raises."""

        def contained(*args: object, **kwargs: object) -> Any:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                self.report(what, error)
                return None

        return contained

    def report(self, what: str, error: Exception) -> None:
        """Say once that something of ours failed."""
        key = (what, type(error).__name__)
        if key not in self._reported:
            self._reported.add(key)
            log.error("trimtab: %s failed (%s); training goes on without it", what, error, exc_info=error)


_REFS: dict[int, weakref.ref[Any]] = {}  # by id: two references to one object are equal


def when_collected(obj: object, function: Callable[..., object], *args: object) -> None:
    """Call `function(*args)` once `obj` is collected, but not any more when the interpreter goes down.

    The garbage collector calls it in whatever thread it happens to run in, one of our own included: `function` must not
    wait for anything. What it raises is logged; from here it would be printed as an ignored exception.
    """

    # What is needed at the very end is bound here: by then globals may be gone.
    def gone(
        ref: weakref.ref[Any],
        refs: dict[int, weakref.ref[Any]] = _REFS,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        refs.pop(id(ref), None)
        if is_finalizing():
            return
        try:
            function(*args)
        except Exception:
            log.exception("trimtab: cleaning up after a collected object failed; training goes on")

    ref = weakref.ref(obj, gone)
    _REFS[id(ref)] = ref
