"""All columns on the CPU: numpy over chunks that stay in the cache, several times faster than torch op by op."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.core.types import F32, Column

FP16_SMALLEST = 2.0**-24
"""The smallest positive float16: what lies below is lost when a gradient is kept in half precision."""

_CHUNK = 1 << 15
_ONES = {np.dtype(t): np.ones(_CHUNK, t) for t in (np.float32, np.float64)}
"""A dot product with ones sums several times faster than `sum`, and in float64 between chunks loses nothing."""


def full(arrays: Sequence[NDArray[Any]], *, fractions: bool = True) -> F32:
    """All columns of `Column` for each real array: a float32 table [arrays, columns]."""
    with np.errstate(all="ignore"):
        rows = [_row(a.reshape(-1), fractions) for a in arrays]
        return np.array(rows, dtype=np.float64).astype(np.float32).reshape(len(arrays), len(Column))


def _row(flat: NDArray[Any], fractions: bool) -> tuple[float, ...]:
    if flat.size == 0:
        return (0.0,) * len(Column)
    if flat.dtype not in _ONES:
        flat = flat.astype(np.float32)
    ones = _ONES[flat.dtype]
    square = summed = largest = 0.0
    nan = inf = zero = tiny = 0
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        magnitude = np.abs(chunk)
        squares = float(np.dot(chunk, chunk))
        if not math.isfinite(squares):  # a bad value, or squares too large for the type: look again, wider
            wide = chunk.astype(np.float64)
            squares = float(np.dot(wide, wide))
            nan += int(np.count_nonzero(np.isnan(chunk)))
            inf += int(np.count_nonzero(np.isinf(chunk)))
            summed += float(wide.sum())
        else:
            summed += float(np.dot(chunk, ones[: chunk.size]))
        square += squares
        largest = max(largest, float(magnitude.max()))
        if fractions and (few := int(np.count_nonzero(magnitude < FP16_SMALLEST))):
            tiny += few
            zero += int(np.count_nonzero(magnitude == 0))
    if nan:
        largest = square = math.nan
    shares = (zero / flat.size, (tiny - zero) / flat.size) if fractions else (math.nan, math.nan)
    return (math.sqrt(square), largest, summed / flat.size, float(nan), float(inf), *shares)
