"""What is usual for each tensor, so that an alarm raised on a scalar can be attributed to layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.core.types import F32

DECAY = 0.8
TINY = 1e-30


class RowBaseline:
    """A running mean of log L2 per named row. Absent and non-finite norms leave it as it was."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._log: NDArray[np.float64] = np.empty(0)
        self._has_unknown = False

    def push(self, names: tuple[str, ...], norms: F32) -> None:
        """Take in the norms of one step; rows may come and go between steps."""
        if names is not self._names and names != self._names:
            self._rename(names)
        if norms.size and norms.min() > 0 and norms.max() < np.inf and not self._has_unknown:
            # The usual case, every step: all rows present and finite. A NaN fails both comparisons.
            self._log += (1.0 - DECAY) * (np.log(norms) - self._log)
            return
        usable = np.isfinite(norms) & (norms >= 0)
        logs = np.log(np.maximum(np.where(usable, norms, 1.0), TINY))
        fresh = np.isnan(self._log)
        blended = DECAY * self._log + (1.0 - DECAY) * logs
        self._log = np.where(usable, np.where(fresh, logs, blended), self._log)
        self._has_unknown = bool(np.isnan(self._log).any())

    def growth(self, names: tuple[str, ...], norms: F32) -> NDArray[np.float64]:
        """How many times its usual norm each row has; 1 where nothing is known, inf for a non-finite norm."""
        if names != self._names:
            return np.ones(len(names))
        finite = np.isfinite(norms)
        logs = np.log(np.maximum(np.where(finite & (norms >= 0), norms, 1.0), TINY))
        grown = np.where(np.isnan(self._log) | (norms < 0), 1.0, np.exp(np.clip(logs - self._log, -300, 300)))
        return np.where(finite, grown, np.inf)

    def usual(self, names: tuple[str, ...]) -> NDArray[np.float64]:
        """The usual log norm of some rows, which must begin the known ones; empty where they are not known."""
        if self._names[: len(names)] != names:
            return np.empty(0)
        return self._log[: len(names)]

    def _rename(self, names: tuple[str, ...]) -> None:
        known = dict(zip(self._names, self._log, strict=True))
        self._log = np.array([known.get(n, np.nan) for n in names], dtype=np.float64)
        self._names = names
        self._has_unknown = True

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {"names": list(self._names), "log": [None if np.isnan(v) else float(v) for v in self._log]}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> RowBaseline:
        """The baseline that `state_dict` described."""
        new = cls()
        names: Sequence[str] = state["names"]
        new._names = tuple(names)
        new._log = np.array([np.nan if v is None else v for v in state["log"]], dtype=np.float64)
        new._has_unknown = bool(np.isnan(new._log).any())
        return new
