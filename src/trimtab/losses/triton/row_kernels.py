"""The small Triton kernels around the stream: rows made comparable, super-rows of rows, anchors, and the way back."""

from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(float("-inf"))
_LOG2E = tl.constexpr(1.4426950408889634)
_SMALL = tl.constexpr(2.0**-60)


@triton.jit
def round_tf32(x):
    """To the nearest number with 10 bits after the point; the matrix units alone would cut off, always towards zero."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def build_rows(
    parts,
    others,
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
    TF32: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Super-rows ``first ..``: products or sums of one row of each of K parts ``[K, B, D]``; their squared lengths.

    The second dimension of the grid are sides: of the second one `others` are the parts, and its results come after
    those of the first.
    """
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    side = tl.program_id(1).to(tl.int64)
    if side == 1:
        parts = others
    rows += side * count * width
    squares += side * count
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
        rounded = round_tf32(value) if TF32 else value.to(rows.dtype.element_ty).to(tl.float32)
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


@triton.jit
def bound_settings(left, num_left, right, num_right, scale, limit, out, BLOCK: tl.constexpr):
    """``out = [c log2(e), whether |z| <= limit, 0, c]`` for logits ``c <X, Y>`` of rows with these squared lengths."""
    lane = tl.arange(0, BLOCK)
    tops = tl.zeros([BLOCK], tl.float32)
    others = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_left, BLOCK):
        tops = tl.maximum(tops, tl.load(left + start + lane, mask=start + lane < num_left, other=0.0))
    for start in range(0, num_right, BLOCK):
        others = tl.maximum(others, tl.load(right + start + lane, mask=start + lane < num_right, other=0.0))
    factor = tl.load(scale)
    bound = tl.abs(factor) * tl.sqrt(tl.max(tops)) * tl.sqrt(tl.max(others))
    tl.store(out, factor * _LOG2E)
    tl.store(out + 1, tl.where(bound <= limit, 1.0, 0.0))
    tl.store(out + 2, 0.0)
    tl.store(out + 3, tl.where(factor == 0, _SMALL, factor))


@triton.jit
def anchor_sums(rows, out, B, others, K: tl.constexpr, BLOCK: tl.constexpr):
    """``out [K, B]``: natural log-sum-exp over all super-rows of an anchor, from those of the super-rows in base 2."""
    m = tl.program_id(0) // B
    i = tl.program_id(0) % B
    step = 1
    for _ in range(K - 1 - m):
        step *= B
    top = tl.full([BLOCK], _NONE, tl.float32)
    below = tl.zeros([BLOCK], tl.float32)
    for start in range(0, others, BLOCK):
        other = start + tl.arange(0, BLOCK)
        row = (other // step) * (step * B) + i * step + other % step
        z = tl.load(rows + row, mask=other < others, other=_NONE)
        new = tl.maximum(top, z)
        shift = tl.where(new == _NONE, 0.0, new)
        below = below * tl.exp2(top - shift) + tl.exp2(z - shift)
        top = new
    high = tl.max(top)
    high = tl.where(high == _NONE, 0.0, high)
    total = tl.sum(below * tl.exp2(top - high))
    tl.store(out + tl.program_id(0), (high + tl.log2(total)) / _LOG2E)


@triton.jit
def pull_rows(
    values, grads, settings, out, first, count, B, K: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr
):
    """What pulls at every super-row p: ``M_p = min_m L_m[p_m]`` and ``sum_m g_m[p_m] exp2(M_p - L_m[p_m])``.

    With them ``sum_m g_m[p_m] exp2(z - L_m[p_m])`` is one exponential of at most 1, whatever the size of z and L.
    Anchors without tuples (``-inf``) are left out. The fast weight has the shift inside: times
    ``exp2(settings[2] - M_p)``. SCALED: all weights times ``c``, which is what the logits are multiplied with.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values += tl.program_id(1) * K * B  # the second dimension of the grid: sides one after the other
    grads += tl.program_id(1) * K * B
    out += tl.program_id(1) * 3 * count
    inside = row < count
    low = tl.full([BLOCK], float("inf"), tl.float32)
    digits = first + row
    for back in tl.static_range(K):
        value = tl.load(values + (K - 1 - back) * B + digits % B, mask=inside, other=0.0) * _LOG2E
        low = tl.where((value < low) & (value != _NONE), value, low)
        digits = digits // B
    low = tl.where(low == float("inf"), 0.0, low)
    total = tl.zeros([BLOCK], tl.float32)
    digits = first + row
    for back in tl.static_range(K):
        at = (K - 1 - back) * B + digits % B
        value = tl.load(values + at, mask=inside, other=0.0) * _LOG2E
        grad = tl.load(grads + at, mask=inside, other=0.0)
        total += tl.where(value == _NONE, 0.0, grad * tl.exp2(low - value))
        digits = digits // B
    if SCALED:
        total *= tl.load(settings + 3)
    tl.store(out + row, low, mask=inside)
    tl.store(out + count + row, total, mask=inside)
    tl.store(out + 2 * count + row, total * tl.exp2(tl.load(settings + 2) - low), mask=inside)


@triton.jit
def merge_partials(parts, out, count, size, TALL: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr):
    """``out [size]``: log-sum-exp (base 2) of ``parts [count, size]`` and, unless FIRST, of what ``out`` holds."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    top = tl.full([TALL, BLOCK], _NONE, tl.float32)
    below = tl.zeros([TALL, BLOCK], tl.float32)
    for start in range(0, count, TALL):
        line = start + tl.arange(0, TALL)
        where = parts + line.to(tl.int64)[:, None] * size + at[None, :]
        z = tl.load(where, mask=(line < count)[:, None] & inside[None, :], other=_NONE)
        new = tl.maximum(top, z)
        shift = tl.where(new == _NONE, 0.0, new)
        below = below * tl.exp2(top - shift) + tl.exp2(z - shift)
        top = new
    high = tl.max(top, 0)
    before = tl.full([BLOCK], _NONE, tl.float32)
    if not FIRST:
        before = tl.load(out + at, mask=inside, other=_NONE)
    new = tl.maximum(high, before)
    shift = tl.where(new == _NONE, 0.0, new)
    total = tl.sum(below * tl.exp2(top - shift[None, :]), 0) + tl.exp2(before - shift)
    tl.store(out + at, shift + tl.log2(total), mask=inside)


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
