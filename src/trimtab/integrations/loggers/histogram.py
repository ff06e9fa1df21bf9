"""Histograms whose bins do not depend on the values: half of a power of two wide, so that one pass over them is enough.

A float32 begins with its sign, its exponent and the first bit of its fraction. These 10 bits are the number of its bin.
NaN and Inf have numbers of their own: they are counted like every other value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

SHIFT = 22
"""How many bits of a float32 are left out of the number of its bin."""
NUM_CODES = 1 << (32 - SHIFT)
_HALF = NUM_CODES // 2  # the sign is the highest bit
_INF, _NAN = _HALF - 2, _HALF - 1
_TINY = 2
"""The lowest numbers belong to zero and to what is smaller than every normal float32: one bin around zero."""
_BOUNDS: NDArray[np.float64] = (
    (np.arange(_TINY, _INF + 1, dtype=np.uint32) << SHIFT).view(np.float32).astype(np.float64)
)
_BOUNDS[-1] = float(np.finfo(np.float32).max)  # the next number would be that of Inf
EDGES: NDArray[np.float64] = np.concatenate([-_BOUNDS[::-1], _BOUNDS])

Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """How often finite values fall between neighbouring `edges`, and how many are NaN or infinite.

    A quantile is right to half of a power of two: to the bin that it lies in.

    Example:
        >>> counts = np.zeros(NUM_CODES, np.int64)
        >>> codes = np.array([1.0, 1.2, -3.0, np.nan, np.inf], np.float32).view(np.uint32) >> SHIFT
        >>> np.add.at(counts, codes, 1)
        >>> found = Histogram.of(counts)
        >>> found.num, found.num_nan, found.num_inf
        (3, 1, 1)
        >>> found.edges.tolist(), found.counts.tolist()
        ([-4.0, -3.0, 1.0, 1.5], [1, 0, 2])
    """

    edges: NDArray[np.float64]
    counts: Counts
    num_nan: int = 0
    num_inf: int = 0

    @classmethod
    def of(cls, codes: Counts, scale: float = 1.0) -> Histogram:
        """From how often each number of a bin was seen; `scale` is what the values were multiplied with."""
        positive, negative = codes[:_HALF], codes[_HALF:]
        tiny = int(positive[:_TINY].sum() + negative[:_TINY].sum())
        counts = np.concatenate([negative[_TINY:_INF][::-1], [tiny], positive[_TINY:_INF]])
        edges, counts = _without_empty_ends(EDGES / scale, counts)
        num_nan, num_inf = int(positive[_NAN] + negative[_NAN]), int(positive[_INF] + negative[_INF])
        return cls(edges=edges, counts=counts, num_nan=num_nan, num_inf=num_inf)

    @property
    def num(self) -> int:
        """How many values are finite."""
        return int(self.counts.sum())

    def quantile(self, fraction: float) -> float:
        """The value that this fraction of the finite values lie below; NaN where there are none."""
        if not self.num:
            return math.nan
        below = np.concatenate([[0], np.cumsum(self.counts)])
        return float(np.interp(fraction * self.num, below, self.edges))

    def linear(self, num_bins: int = 64) -> tuple[Counts, NDArray[np.float64]]:
        """Counts and edges of bins of equal width: what a logger draws that knows no others. No value is lost."""
        if not self.num:
            return np.zeros(num_bins, np.int64), np.linspace(-1.0, 1.0, num_bins + 1)
        edges = np.linspace(self.edges[0], self.edges[-1], num_bins + 1)
        below = np.interp(edges, self.edges, np.concatenate([[0], np.cumsum(self.counts)]))
        return np.diff(np.rint(below)).astype(np.int64), edges

    def moments(self) -> tuple[float, float]:
        """Sum and sum of squares, each value taken for the middle of its bin."""
        middles = (self.edges[:-1] + self.edges[1:]) / 2.0
        return float(middles @ self.counts), float(middles**2 @ self.counts)


def _without_empty_ends(edges: NDArray[np.float64], counts: Counts) -> tuple[NDArray[np.float64], Counts]:
    """From the first value to the last one; empty bins that are neighbours become one."""
    (seen,) = np.nonzero(counts)
    if not len(seen):
        return np.zeros(1), np.zeros(0, np.int64)
    first, last = int(seen[0]), int(seen[-1]) + 1
    counts, edges = counts[first:last], edges[first : last + 1]
    kept = np.concatenate([[True], (counts[1:] > 0) | (counts[:-1] > 0), [True]])
    starts = np.flatnonzero(kept)
    return edges[starts], np.add.reduceat(counts, starts[:-1]).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Histograms:
    """The histograms of one step, as they come from the device: one row of counts per tensor."""

    may_be_dropped: ClassVar[bool] = True
    """The next ones come soon: a slow logger need not get them all."""
    step: int
    names: tuple[str, ...]
    codes: Counts
    scales: Mapping[int, float]

    def named(self) -> dict[str, Histogram]:
        """Each histogram by its name."""
        return {
            name: Histogram.of(row, self.scales.get(i, 1.0))
            for i, (name, row) in enumerate(zip(self.names, self.codes, strict=True))
        }


def nonfinite_counts(found: Mapping[str, Histogram]) -> dict[str, float]:
    """NaN and Inf as numbers beside the histograms: of all tensors of a kind, and of each that has any."""
    totals: dict[str, float] = {}
    single: dict[str, float] = {}
    for name, one in found.items():
        kind = name.rsplit("/", 1)[0]
        for what, num in (("nan", one.num_nan), ("inf", one.num_inf)):
            totals[f"{kind}/{what}"] = totals.get(f"{kind}/{what}", 0.0) + num
            if num:
                single[f"{name}/{what}"] = float(num)
    return totals | single


def as_scalars(found: Mapping[str, Histogram]) -> dict[str, float]:
    """Histograms for a logger that has none: the median, the range of the middle 98 %, NaN and Inf."""
    out = nonfinite_counts(found)
    for name, one in found.items():
        if one.num:
            out |= {f"{name}/{label}": one.quantile(q) for label, q in (("p01", 0.01), ("p50", 0.5), ("p99", 0.99))}
    return out
