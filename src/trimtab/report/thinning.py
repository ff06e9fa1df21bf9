"""Chooses which points of a long series a chart needs: every stretch keeps its peaks, and nothing bad is lost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUM_STRETCHES = 800
REACH = 50
"""So many steps before and after a finding every point is kept."""
MAX_CLOSE = 20
"""Around so many findings: a run that is bad all over need not be kept twice."""


def pick_points(steps: Ints, values: Floats, near: Sequence[int] = (), *, num_stretches: int = NUM_STRETCHES) -> Ints:
    """Choose indices in order: of each stretch its lowest, its highest and its first non-finite value.

    The first and the last point stay, and so does every point close to one of the steps in `near`. A series that is
    short enough stays whole.

    Example:
        >>> values = np.zeros(1000)
        >>> values[500] = 7.0
        >>> picked = pick_points(np.arange(1000), values, num_stretches=10)
        >>> len(picked), 500 in picked
        (12, True)
    """
    num = len(values)
    if num <= 2 * num_stretches:
        return np.arange(num)
    starts = np.linspace(0, num, num_stretches, endpoint=False).astype(np.int64)
    stretch = np.repeat(np.arange(num_stretches), np.diff(np.append(starts, num)))
    finite = np.isfinite(values)
    high, low = np.where(finite, values, -np.inf), np.where(finite, values, np.inf)
    keep = np.zeros(num, dtype=bool)
    keep[[0, -1]] = True
    for wanted in (
        finite & (high == np.maximum.reduceat(high, starts)[stretch]),
        finite & (low == np.minimum.reduceat(low, starts)[stretch]),
        ~finite,
    ):
        found = np.flatnonzero(wanted)
        keep[found[np.unique(stretch[found], return_index=True)[1]]] = True
    for step in sorted(set(near))[:MAX_CLOSE]:
        keep |= np.abs(steps - step) <= REACH
    return np.flatnonzero(keep)
