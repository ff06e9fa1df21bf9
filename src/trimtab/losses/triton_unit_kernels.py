"""The Triton kernels that make rows comparable: one pass over the rows, and one back."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first"])
def unit_rows(
    xs,
    keep,
    rows,
    lengths,
    tops,
    count,
    stride,
    D,
    divisor,
    first,
    MASKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rows ``[count, D]`` over their lengths (over `divisor`), and the two factors of each length.

    Divided by its largest entry a row can neither overflow nor vanish when squared. `xs` and `rows` may be one.
    The factors of a zero row are 1 and infinity: no gradient gets through.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = row < count
    place = first + row  # among those of all modalities
    ok = inside[:, None] & (d < D)[None, :]
    there = ok
    if MASKED:
        there = ok & (tl.load(keep + place, mask=inside, other=0) != 0)[:, None]
    x = tl.load(xs + row.to(tl.int64)[:, None] * stride + d[None, :], mask=there, other=0.0).to(tl.float32)
    top = tl.max(tl.abs(x), 1)
    x = x / tl.where(top == 0, 1.0, top)[:, None]
    length = tl.sqrt(tl.sum(x * x, 1)) / divisor
    zero = length == 0  # a NaN is not: the whole row becomes one
    length = tl.where(zero, 1.0, length)
    tl.store(rows + place.to(tl.int64)[:, None] * D + d[None, :], x / length[:, None], mask=ok)
    tl.store(lengths + place, length, mask=inside)
    tl.store(tops + place, tl.where(zero, float("inf"), top), mask=inside)


@triton.jit(do_not_specialize=["first"])
def unit_grads(
    grads,
    rows,
    lengths,
    tops,
    out,
    count,
    stride,
    D,
    squared,
    first,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What is left of the gradients ``[count, D]`` of such rows across them, over their lengths."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    d = tl.arange(0, BLOCK_D)
    inside = row < count
    place = first + row  # among those of all modalities
    ok = inside[:, None] & (d < D)[None, :]
    g = tl.load(grads + row.to(tl.int64)[:, None] * stride + d[None, :], mask=ok, other=0.0)
    x = tl.load(rows + place.to(tl.int64)[:, None] * D + d[None, :], mask=ok, other=0.0)
    along = tl.sum(g * x, 1) / squared
    length = tl.load(lengths + place, mask=inside, other=1.0)
    top = tl.load(tops + place, mask=inside, other=1.0)
    across = (g - x * along[:, None]) / length[:, None] / top[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * D + d[None, :], across.to(out.dtype.element_ty), mask=ok)
