"""A scalar over the run, reduced to what a chart and a sentence need. No non-finite value can spoil it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

MAX_POINTS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A scalar's key values over its finite part, and at most `MAX_POINTS` points that keep every peak."""

    first_step: int
    last_step: int
    num: int
    num_nonfinite: int
    first: float
    last: float
    lowest: float
    highest: float
    median: float
    steps: tuple[int, ...]
    values: tuple[float, ...]


def make_curve(steps: ArrayLike, values: ArrayLike) -> Curve | None:
    """Reduce a series to a `Curve`; None where there is no value at all."""
    at = np.asarray(steps, dtype=np.int64).ravel()
    all_values = np.asarray(values, dtype=np.float64).ravel()
    if all_values.size == 0:
        return None
    finite = all_values[np.isfinite(all_values)]
    some = finite if finite.size else np.array([math.nan])
    kept = pick_peaks(all_values, MAX_POINTS)
    return Curve(
        first_step=int(at[0]),
        last_step=int(at[-1]),
        num=int(all_values.size),
        num_nonfinite=int(all_values.size - finite.size),
        first=float(some[0]),
        last=float(some[-1]),
        lowest=float(some.min()),
        highest=float(some.max()),
        median=float(np.median(some)),
        steps=tuple(int(s) for s in at[kept]),
        values=tuple(float(v) for v in all_values[kept]),
    )


def pick_peaks(values: NDArray[np.float64], num: int) -> list[int]:
    """Choose at most `num` indices, one per stretch: its highest finite value, or a non-finite one if there is any.

    A mean would hide the one bad step that a person looks for.
    """
    edges = np.linspace(0, values.size, min(num, values.size) + 1).astype(int)
    picked: list[int] = []
    for low, high in pairwise(edges):
        part = values[low:high]
        bad = np.flatnonzero(~np.isfinite(part))
        picked.append(int(low + (bad[0] if bad.size else np.argmax(part))))
    return picked


def tail_median(values: Sequence[float] | NDArray[np.float64], num: int) -> float:
    """The median of the last `num` finite values; NaN where there is none."""
    array = np.asarray(values, dtype=np.float64)
    finite = array[np.isfinite(array)][-num:]
    return float(np.median(finite)) if finite.size else math.nan
