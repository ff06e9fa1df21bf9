"""Layers over time in one byte per cell: how large the gradient of a parameter was in a stretch of steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.core.types import ABSENT, F32, FROZEN
from trimtab.report.thinning import Ints

MAX_STRETCHES = 512
_MAX_PENDING = 1 << 22  # floats

# A cell's byte: what is not a positive finite number has a code of its own, the rest is a logarithm within its row.
UNKNOWN, FROZEN_CELL, NO_GRADIENT, ZERO, FIRST, LAST, INF, NAN = 0, 1, 2, 3, 4, 253, 254, 255
_NOT_MEASURED = np.float32(-3.0)  # below ABSENT and FROZEN, so that a maximum prefers whatever was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """The norms of all parameters over a run; column `i` covers `width` steps from `first_step + i * width` on.

    A code `c` from FIRST to LAST means `2 ** (low + (c - FIRST) / (LAST - FIRST) * (high - low))` of its row.
    """

    names: tuple[str, ...]
    first_step: int
    width: int
    codes: NDArray[np.uint8]
    low: NDArray[np.float64]
    high: NDArray[np.float64]


class HeatTable:
    """Takes the norms of a run as they come, in bounded memory: too many columns, and neighbours become one.

    A cell is the largest norm of its stretch. NaN and Inf are larger than everything, zero is larger than a missing
    gradient, and that is larger than not measured.

    Example:
        >>> table = HeatTable(max_stretches=4)
        >>> for step in range(10):
        ...     table.add(step, ("w",), np.array([step], dtype=np.float32))
        >>> heat = table.finish()
        >>> heat.width, heat.codes.shape
        (4, (1, 3))
    """

    def __init__(self, max_stretches: int = MAX_STRETCHES) -> None:
        self.max_stretches = max_stretches
        self.width = 1
        self._steps: list[int] = []
        self._rows: dict[str, int] = {}
        self._pending: dict[int, tuple[tuple[str, ...], list[int], list[F32]]] = {}
        self._num_pending = 0
        self._base = 0
        self._norms = np.empty((0, 0), dtype=np.float32)  # column by row; column 0 starts at step base * width

    def add(self, step: int, names: tuple[str, ...], norms: F32) -> None:
        """Take one sample's norms."""
        # A layout names its rows with one tuple for all its samples: compared by identity, not name by name.
        _, steps, parts = self._pending.setdefault(id(names), (names, [], []))
        steps.append(step)
        parts.append(norms)
        self._steps.append(step)
        self._num_pending += norms.size
        if self._num_pending > _MAX_PENDING:
            self._flush()

    def finish(self) -> HeatMap | None:
        """All that was taken, in one byte per cell; None where nothing was."""
        self._flush()
        if not self._steps:
            return None
        apart = np.diff(np.unique(self._steps))
        usual = float(np.quantile(apart, 0.95)) if apart.size else 1.0
        while self.width < usual and len(self._norms) > 1:  # a thinned record must not leave stripes
            self._widen()
        codes, low, high = quantise(self._norms.T)
        first = self._base * self.width
        return HeatMap(names=tuple(self._rows), first_step=first, width=self.width, codes=codes, low=low, high=high)

    def _flush(self) -> None:
        for names, steps, parts in self._pending.values():
            self._merge(names, np.array(steps, dtype=np.int64), np.stack(parts))
        self._pending.clear()
        self._num_pending = 0

    def _merge(self, names: tuple[str, ...], steps: Ints, part: F32) -> None:
        first, last = int(steps.min()), int(steps.max())
        if len(self._norms):
            first = min(first, self._base * self.width)
            last = max(last, (self._base + len(self._norms)) * self.width - 1)
        while last // self.width - first // self.width >= self.max_stretches:
            self._widen()
        rows = [self._rows.setdefault(name, len(self._rows)) for name in names]
        self._reach(first // self.width, last // self.width)
        columns = steps // self.width - self._base
        if (np.diff(columns) < 0).any():  # after a rewind steps go back
            order = np.argsort(columns, kind="stable")
            part, columns = part[order], columns[order]
        columns, starts = np.unique(columns, return_index=True)
        where = np.ix_(columns, np.array(rows, dtype=np.int64))
        self._norms[where] = np.maximum(self._norms[where], np.maximum.reduceat(part, starts, axis=0))

    def _reach(self, first: int, last: int) -> None:
        """Make room for these columns and for every row known by now."""
        old, base = self._norms, self._base if len(self._norms) else first
        self._norms = np.full((last - first + 1, len(self._rows)), _NOT_MEASURED, dtype=np.float32)
        self._norms[base - first : base - first + len(old), : old.shape[1]] = old
        self._base = first

    def _widen(self) -> None:
        if len(self._norms):
            columns = (self._base + np.arange(len(self._norms))) // 2
            self._norms = np.maximum.reduceat(self._norms, np.unique(columns, return_index=True)[1], axis=0)
            self._base //= 2
        self.width *= 2


def quantise(norms: F32) -> tuple[NDArray[np.uint8], NDArray[np.float64], NDArray[np.float64]]:
    """One byte per cell, and the range of log2 of each row."""
    known = np.isfinite(norms) & (norms > 0)
    logs = np.log2(np.where(known, norms, 1.0).astype(np.float64))
    low = np.where(known, logs, np.inf).min(axis=1, initial=np.inf)
    high = np.where(known, logs, -np.inf).max(axis=1, initial=-np.inf)
    low, high = np.where(np.isfinite(low), low, 0.0), np.where(np.isfinite(high), high, 0.0)
    span = np.where(high > low, high - low, 1.0)
    level = FIRST + np.rint((logs - low[:, None]) / span[:, None] * (LAST - FIRST))
    special = np.select(
        [np.isnan(norms), np.isinf(norms), norms == 0, norms == ABSENT, norms == FROZEN],
        [NAN, INF, ZERO, NO_GRADIENT, FROZEN_CELL],
        default=UNKNOWN,
    )
    return np.where(known, level, special).astype(np.uint8), low, high
