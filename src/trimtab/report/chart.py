"""Scalars over a run: thinned so that nothing bad is lost, reduced to curves, and drawn in block characters."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDE = 50.0
"""From this ratio of the largest to the smallest value on, a linear axis would show one spike and a flat line."""
BAD, MARK = "×", "▲"


def sparkline(values: Sequence[float], width: int = 60, *, beside: Sequence[float] = ()) -> str:
    """One line of blocks; a stretch without any finite value is drawn as `×`.

    Lines with the same values `beside` them have the same axis, so that they can be compared.

    Example:
        >>> sparkline([1, 2, 3, float("nan"), 3, 2, 1])
        '▁▅█×█▅▁'
    """
    if not values:
        return ""
    columns = [_highest(part) for part in _split(values, width)]
    scale = _scale([*columns, *beside], height=1)
    return "".join(BAD if math.isnan(v) else BLOCKS[scale(v)] for v in columns)


def chart(
    curve: Curve, *, width: int = 64, height: int = 4, marks: Collection[int] = (), bad: Collection[int] = ()
) -> list[str]:
    """Draw a curve with its axis, and under it `×` where a step was bad and `▲` where something was found."""
    parts = _split(curve.values, width)
    columns = [_highest(part) for part in parts]
    scale = _scale(columns, height)
    levels = [0 if math.isnan(v) else scale(v) for v in columns]
    top, bottom = _label(curve.highest), _label(curve.lowest)
    lines = []
    for row in range(height - 1, -1, -1):
        blocks = "".join(BLOCKS[min(max(level - 8 * row, 0), 8)] for level in levels)
        label = top if row == height - 1 else bottom if row == 0 else ""
        lines.append(f"{label:>8} ┤{blocks}" if label else f"{'':>8} │{blocks}")
    lines.append(f"{'':>8} └{_axis(curve, parts, marks, bad)}")
    first, last = str(curve.first_step), str(curve.last_step)
    lines.append(f"{'step':>8}  {first}{last:>{max(len(columns) - len(first), len(last) + 1)}}")
    return lines


def is_wide(values: Sequence[float]) -> bool:
    """Whether these values need a logarithmic axis."""
    finite = [v for v in values if math.isfinite(v)]
    return bool(finite) and min(finite) > 0 and max(finite) / min(finite) > WIDE


def _axis(curve: Curve, parts: list[Sequence[float]], marks: Collection[int], bad: Collection[int]) -> str:
    edge = 0
    axis = []
    for part in parts:
        low = curve.steps[edge]
        edge += len(part)
        high = curve.steps[edge] if edge < len(curve.steps) else curve.last_step + 1
        if any(low <= s < high for s in bad) or not all(math.isfinite(v) for v in part):
            axis.append(BAD)
        else:
            axis.append(MARK if any(low <= s < high for s in marks) else "─")
    return "".join(axis)


def _split(values: Sequence[float], width: int) -> list[Sequence[float]]:
    num = min(width, len(values))
    edges = [i * len(values) // num for i in range(num + 1)]
    return [values[a:b] for a, b in pairwise(edges)]


def _highest(part: Sequence[float]) -> float:
    return max((v for v in part if math.isfinite(v)), default=math.nan)


def _scale(values: Sequence[float], height: int) -> Callable[[float], int]:
    """Make the map from a value to a level, 1 to 8 * height; a constant series lies at the bottom."""
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    bend: Callable[[float], float] = math.log if is_wide(finite) else float
    low, high = bend(min(finite)), bend(max(finite))

    def level(value: float) -> int:
        span = high - low
        part = (bend(value) - low) / span if span > 0 and math.isfinite(span) else 0.0
        return 1 + round(part * (8 * height - 1))

    return level


def _label(value: float) -> str:
    return f"{value:.3g}"


MAX_POINTS = 240


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A scalar's key values over its finite part, and at most `MAX_POINTS` points that keep every peak.

    `began` and `ended` are the very first and last value, NaN and Inf included.
    """

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
    began: float
    ended: float


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
        began=float(all_values[0]),
        ended=float(all_values[-1]),
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
