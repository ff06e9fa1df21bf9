"""Charts of block characters: finite-safe, logarithmic where the range is wide, with marks under the bad steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise

from trimtab.report.curve import Curve

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
