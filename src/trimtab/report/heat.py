"""Layers over time in one byte per cell: how large the gradient of a parameter was in a stretch of steps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.core.types import ABSENT, F32, FROZEN
from trimtab.report.thinning import Ints

MAX_STRETCHES = 400

# A cell's byte: what is not a positive finite number has a code of its own, the rest is a logarithm within its row.
UNKNOWN, FROZEN_CELL, NO_GRADIENT, ZERO, FIRST, LAST, INF, NAN = 0, 1, 2, 3, 4, 253, 254, 255
_NOT_MEASURED = np.float32(-3.0)  # below ABSENT and FROZEN, so that a maximum prefers whatever was measured

Norms = tuple[int, tuple[str, ...], F32]
"""One sample's step, the names of its rows, and their norms."""


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


def make_heat_map(samples: Iterable[Norms], *, max_stretches: int = MAX_STRETCHES) -> HeatMap | None:
    """Reduce the norms of a run to at most `max_stretches` columns; None where there are none.

    A cell is the largest norm of its stretch. NaN and Inf are larger than everything, zero is larger than a missing
    gradient, and that is larger than not measured.
    """
    taken = list(samples)
    if not taken:
        return None
    # A layout names its rows with one tuple for all its samples: compared by identity, not name by name.
    alike: dict[int, list[Norms]] = {}
    for sample in taken:
        alike.setdefault(id(sample[1]), []).append(sample)
    names = tuple(dict.fromkeys(name for group in alike.values() for name in group[0][1]))
    at = {name: i for i, name in enumerate(names)}
    steps = np.array([t[0] for t in taken], dtype=np.int64)
    first, width = int(steps.min()), stretch_width(steps, max_stretches)
    norms = np.full(((int(steps.max()) - first) // width + 1, len(names)), _NOT_MEASURED, dtype=np.float32)
    for group in alike.values():
        part = np.stack([t[2] for t in group])
        columns = (np.array([t[0] for t in group], dtype=np.int64) - first) // width
        if (np.diff(columns) < 0).any():  # after a rewind steps go back
            order = np.argsort(columns, kind="stable")
            part, columns = part[order], columns[order]
        columns, starts = np.unique(columns, return_index=True)
        where = np.ix_(columns, np.array([at[name] for name in group[0][1]], dtype=np.int64))
        norms[where] = np.maximum(norms[where], np.maximum.reduceat(part, starts, axis=0))
    codes, low, high = quantise(norms.T)
    return HeatMap(names=names, first_step=first, width=width, codes=codes, low=low, high=high)


def stretch_width(steps: Ints, max_stretches: int) -> int:
    """How many steps a column covers: as few as fit, but enough that a thinned record leaves no stripes."""
    apart = np.diff(np.unique(steps))
    usual = float(np.quantile(apart, 0.95)) if apart.size else 1.0
    span = int(steps.max()) - int(steps.min()) + 1
    return max(-(-span // max_stretches), min(int(usual), span))


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
