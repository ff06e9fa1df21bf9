"""A one-sided CUSUM: adds up how far values lie above a reference, and alarms when the sum says it is no chance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

SLACK = 2.5
CAP = 6.0
LIMIT = 20.0
"""With these a run that stays at its reference level, under normal noise, is alarmed less than once in ten million
steps (tests/core/test_cusum.py simulates it); a rise by six deviations is found after six steps."""


class Cusum:
    """The sum, and where it last began to grow: the change point."""

    __slots__ = ("onset", "total")

    def __init__(self) -> None:
        self.total = 0.0
        self.onset = -1

    def push(self, z: float, step: int) -> None:
        """Take in one value in units of the noise; a single outlier counts for no more than `CAP`."""
        if not math.isfinite(z):
            return
        if self.total == 0.0:
            self.onset = step
        self.total = max(0.0, self.total + min(z, CAP) - SLACK)

    @property
    def alarmed(self) -> bool:
        """Whether the sum is beyond chance."""
        return self.total > LIMIT

    def reset(self) -> None:
        """Start over: the reference has changed."""
        self.total, self.onset = 0.0, -1

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {"total": self.total, "onset": self.onset}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Cusum:
        """The sum that `state_dict` described."""
        new = cls()
        new.total, new.onset = float(state["total"]), int(state["onset"])
        return new
