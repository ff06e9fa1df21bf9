"""The Triton kernels that make super-rows of rows, and gradients of rows of those of super-rows."""

# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-decorators=False

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def build_rows(
    parts,
    keep,
    rows,
    squares,
    first,
    count,
    B,
    D,
    width,
    factor,
    K: tl.constexpr,
    ADD: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Super-rows ``first ..``: products (or sums) of one row of each of K parts ``[K, B, D]``, and their squared lengths."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inside = row < count
    length = tl.zeros([BLOCK_ROWS], tl.float32)
    exists = inside
    if MASKED:
        exists = tl.load(keep + row, mask=inside, other=0) != 0
    for start in range(0, width, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        ok = exists[:, None] & (d < D)[None, :]
        digits = first + row
        value = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32) if ADD else tl.full([BLOCK_ROWS, BLOCK_D], 1.0, tl.float32)
        for back in tl.static_range(K):
            entry = (K - 1 - back) * B + digits % B
            digits = digits // B
            x = tl.load(parts + entry.to(tl.int64)[:, None] * D + d[None, :], mask=ok, other=0.0)
            value = value + x if ADD else value * x
        rounded = value.to(rows.dtype.element_ty).to(tl.float32)
        length += tl.sum(rounded * rounded, 1)
        where = rows + row.to(tl.int64)[:, None] * width + d[None, :]
        tl.store(where, (rounded * factor).to(rows.dtype.element_ty), mask=inside[:, None] & (d < width)[None, :])
    tl.store(squares + row, length, mask=inside)


@triton.jit
def fold_rows(
    grads,
    parts,
    out,
    first,
    count,
    B,
    D,
    stride,
    others,
    K: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The gradient of one row of one part from the gradients of all super-rows it is in: ``out [K, B, D]``."""
    m = tl.program_id(0) // B
    i = tl.program_id(0) % B
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    step = 1  # numbers of super-rows that differ by one in digit m
    for _ in range(K - 1 - m):
        step *= B
    total = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, others, BLOCK_ROWS):
        other = start + tl.arange(0, BLOCK_ROWS)
        row = (other // step) * (step * B) + i * step + other % step
        inside = (other < others) & (row >= first) & (row < first + count)
        ok = inside[:, None] & (d < D)[None, :]
        value = tl.load(grads + (row - first).to(tl.int64)[:, None] * stride + d[None, :], mask=ok, other=0.0)
        if not ADD:
            digits = row
            for back in tl.static_range(K):
                n = K - 1 - back
                entry = n * B + digits % B
                digits = digits // B
                if m != n:
                    value *= tl.load(parts + entry.to(tl.int64)[:, None] * D + d[None, :], mask=ok, other=0.0)
        total += tl.sum(value, 0)
    tl.store(out + tl.program_id(0).to(tl.int64) * D + d, total, mask=d < D)
