"""The guard's own failures stay its own: reported once, never passed on to training."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from trimtab.core.errors import TrimtabError

log = logging.getLogger("trimtab")


class Contained:
    """Calls things that must not break a training run. Errors trimtab raises on purpose pass through."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()

    def call(self, what: str, function: Callable[..., Any], *args: Any, default: Any = None) -> Any:
        """`function(*args)`, or `default` if it raises; each kind of failure is reported once, with its traceback."""
        try:
            return function(*args)
        except TrimtabError:
            raise
        except Exception as error:
            key = (what, type(error).__name__)
            if key not in self._reported:
                self._reported.add(key)
                log.exception("trimtab: %s failed (%s); training goes on without it", what, error)
            return default


class ContainedLane:
    """A lane behind containment: if it breaks, whatever it had begun is undone and the step goes through unguarded."""

    def __init__(self, lane: Any, contained: Contained) -> None:
        self._lane, self._contained = lane, contained

    @property
    def attempts(self) -> int:
        """How many steps the lane has seen."""
        return int(self._lane.attempts)

    def told(self, loss: Any) -> None:
        """Pass on a closure's loss."""
        self._contained.call("reading a closure's loss", self._lane.told, loss)

    def before(self) -> None:
        """Measure and decide, or let the step through."""
        if self._contained.call("measuring a step", self._run, self._lane.before, default=False) is False:
            self._contained.call("cleaning up after a failure", self._lane.abandon)

    def after(self) -> None:
        """Finish the step."""
        if self._contained.call("finishing a step", self._run, self._lane.after, default=False) is False:
            self._contained.call("cleaning up after a failure", self._lane.abandon)

    def skipped(self) -> None:
        """Count a step that a scaler skipped."""
        if self._contained.call("counting a skipped step", self._run, self._lane.skipped, default=False) is False:
            self._contained.call("cleaning up after a failure", self._lane.abandon)

    def release(self) -> bool:
        """Give withheld gradients back."""
        return bool(self._contained.call("giving gradients back", self._lane.release, default=False))

    def revoked(self) -> None:
        """Note that a closure-driven step was undone."""
        self._contained.call("noting an undone step", self._lane.revoked)

    @staticmethod
    def _run(function: Callable[[], None]) -> bool:
        function()
        return True
