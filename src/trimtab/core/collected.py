"""Be told when an object is collected: such a call may come in any thread, and while the interpreter goes down."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger("trimtab")
_REFS: set[weakref.ref[Any]] = set()


def when_collected(obj: object, function: Callable[..., object], *args: object) -> None:
    """Call `function(*args)` once `obj` is collected, but not any more when the interpreter goes down.

    The garbage collector calls it in whatever thread it happens to run in, one of our own included: `function` must not
    wait for anything. What it raises is logged; from here it would be printed as an ignored exception.
    """

    # What is needed at the very end is bound here: by then globals may be gone.
    def gone(
        ref: weakref.ref[Any],
        refs: set[weakref.ref[Any]] = _REFS,
        is_finalizing: Callable[[], bool] = sys.is_finalizing,
    ) -> None:
        refs.discard(ref)
        if is_finalizing():
            return
        try:
            function(*args)
        except Exception:
            log.exception("trimtab: cleaning up after a collected object failed; training goes on")

    _REFS.add(weakref.ref(obj, gone))
