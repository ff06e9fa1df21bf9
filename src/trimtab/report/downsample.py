"""A long series as a few hundred buckets that never hide an extreme: lowest, highest, middle and bad values of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NUM_BUCKETS = 800
REACH = 50
"""Steps before and after a finding that have a bucket each."""
MAX_CLOSE = 20
"""Findings around which every step has its bucket: a run that is bad all over need not be kept twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """A series in order of its steps; bucket `i` covers the steps from `first[i]` to `last[i]`, both of which exist.

    `low`, `middle` (the median) and `high` are over the finite values, and NaN where a bucket has none. `num` counts
    all values, `bad` those that are NaN or Inf, and `nan` those that are NaN.
    """

    first: Ints
    last: Ints
    low: Floats
    middle: Floats
    high: Floats
    num: Ints
    bad: Ints
    nan: Ints

    def __len__(self) -> int:
        """How many buckets there are."""
        return len(self.first)


def downsample(
    steps: ArrayLike, values: ArrayLike, *, num_buckets: int = NUM_BUCKETS, near: Sequence[int] = ()
) -> Buckets:
    """Reduce a series to about `num_buckets` buckets of equally many steps; empty ones are left out.

    Steps may go back, as after a rewind: what was measured twice at a step is in one bucket. Around each step in
    `near` every step has a bucket of its own. A series that is short enough keeps every step.

    Example:
        >>> values = np.zeros(1000)
        >>> values[500], values[700] = 7.0, np.nan
        >>> found = downsample(np.arange(1000), values, num_buckets=10)
        >>> len(found), found.high.max(), found.bad.sum()
        (10, np.float64(7.0), np.int64(1))
    """
    if num_buckets < 1:
        raise ValueError(f"num_buckets is {num_buckets}, expected at least 1")
    at = np.asarray(steps, dtype=np.int64).ravel()
    data = np.asarray(values, dtype=np.float64).ravel()
    if at.size != data.size:
        raise ValueError(f"{at.size} steps and {data.size} values, expected one value for each step")
    if (np.diff(at) < 0).any():
        order = np.argsort(at, kind="stable")
        at, data = at[order], data[order]
    starts = _starts(at, num_buckets, near)
    return _reduce(at, data, starts)


def _starts(at: Ints, num_buckets: int, near: Sequence[int]) -> Ints:
    """Where in the sorted series each bucket begins."""
    if not at.size:
        return np.empty(0, np.int64)
    new_step = np.append(True, np.diff(at) > 0)
    if int(new_step.sum()) <= 2 * num_buckets:
        return np.flatnonzero(new_step)
    edges = np.linspace(float(at[0]), float(at[-1]) + 1.0, num_buckets + 1)[:-1]
    wanted = [np.searchsorted(at, np.ceil(edges).astype(np.int64))]
    for step in sorted(set(near))[:MAX_CLOSE]:
        inside = np.arange(*np.searchsorted(at, [step - REACH, step + REACH + 1]))
        wanted.append(inside[new_step[inside]])
        wanted.append(np.searchsorted(at, [step + REACH + 1]))
    starts = np.unique(np.concatenate(wanted))
    return starts[starts < at.size]


def _reduce(at: Ints, data: Floats, starts: Ints) -> Buckets:
    if not starts.size:
        none, nothing = np.empty(0, np.int64), np.empty(0, np.float64)
        return Buckets(first=none, last=none, low=nothing, middle=nothing, high=nothing, num=none, bad=none, nan=none)
    ends = np.append(starts[1:], at.size)
    finite = np.isfinite(data)
    bad = np.add.reduceat((~finite).astype(np.int64), starts)
    nan = np.add.reduceat(np.isnan(data).astype(np.int64), starts)
    low = np.minimum.reduceat(np.where(finite, data, np.inf), starts)
    high = np.maximum.reduceat(np.where(finite, data, -np.inf), starts)
    empty = bad == ends - starts
    return Buckets(
        first=at[starts],
        last=at[ends - 1],
        low=np.where(empty, np.nan, low),
        middle=_middles(data, starts, ends, low, high, empty),
        high=np.where(empty, np.nan, high),
        num=ends - starts,
        bad=bad,
        nan=nan,
    )


def _middles(data: Floats, starts: Ints, ends: Ints, low: Floats, high: Floats, empty: NDArray[np.bool_]) -> Floats:
    out = np.where(empty, np.nan, low)
    for i in np.flatnonzero(~empty & (high > low)):
        part = data[starts[i] : ends[i]]
        part = part[np.isfinite(part)]
        out[i] = np.sort(part)[(part.size - 1) // 2]  # one that was measured: between two lies what never was
    return out
