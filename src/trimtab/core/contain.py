"""The guard's own failures stay its own: reported once, never passed on to training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from trimtab.core.errors import TrimtabError

log = logging.getLogger("trimtab")


class Contained:
    """Calls things that must not break a training run. Each kind of failure is reported once, with its traceback."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def call(self, what: str, function: Callable[..., Any], *args: Any, default: Any = None) -> Any:
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

        def contained(*args: Any, **kwargs: Any) -> Any:
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
