"""The Triton kernels of the D-free stream: one warp walks through the tuples of some columns, no width anywhere.

The similarity of tuple ``(p, q)`` is ``f(a_p + b_q + sum_m H_m[p_m, q])``. A program holds ``H`` of the last left
modality for BP of its rows and ``C W`` columns, as ``[C, BP, W]``: with W = 16 four lanes share a row, so that a sum
over the columns is two shuffles, and everything along C stays within one thread. It walks through the rows of the other
left modalities (the `lead`). ``tables`` holds the ``H_m [B, Q]`` one after the other. Logits are in units of ln 2;
``settings = [c log2(e), fast, middle]`` are read on the device, as in `stream_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NONE = tl.constexpr(float("-inf"))
_TINY = tl.constexpr(1e-37)


@triton.jit
def _place(lead, B, block, q, SR, BP: tl.constexpr, THREE: tl.constexpr):
    """Rows of the tables that a lead stands for, and the place (row, column) of its positive."""
    first = lead // B if THREE else lead
    second = lead % B
    some = (first == second) if THREE else True
    return first, second, tl.where(some, first - block, -1), first * SR - q


@triton.jit
def _kept(kept, row, column, positive_row, positive_column, C: tl.constexpr, W: tl.constexpr):
    """`kept` without the positive."""
    own = (row == positive_row)[None, :, None] & (column == positive_column)[:, None, :]
    return kept & ~own


@triton.jit
def gram_sums(
    a,
    b,
    tables,
    row_keep,
    column_keep,
    settings,
    row_top,
    column_top,
    row_sum,
    column_sum,
    B,
    Q,
    SR,
    first_lead,
    num_leads,
    per_program,
    MODE: tl.constexpr,
    ROOT: tl.constexpr,
    THREE: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
    C: tl.constexpr,
    BP: tl.constexpr,
    W: tl.constexpr,
):
    """Of rows and columns, MODE 0: sums of ``exp2(z - settings[2])``; 1: maxima; 2: sums of ``exp2(z - maximum)``."""
    if (tl.load(settings + 1) != 0) != (MODE == 0):
        return
    factor = tl.load(settings)
    middle = tl.load(settings + 2)
    q = tl.program_id(0) * (C * W)
    block = tl.program_id(1) * BP
    column = tl.arange(0, C)[:, None] * W + tl.arange(0, W)[None, :]
    row = tl.arange(0, BP)
    columns, rows = q + column, block + row
    in_column, in_row = columns < Q, rows < B
    last = tables + (2 * B * Q if THREE else B * Q)
    held = tl.load(
        last + rows[None, :, None] * Q + columns[:, None, :],
        mask=in_row[None, :, None] & in_column[:, None, :],
        other=0.0,
    )
    held += tl.load(b + columns, mask=in_column, other=0.0)[:, None, :]
    kept = in_row[None, :, None] & in_column[:, None, :]
    if MASKED:
        kept &= (tl.load(column_keep + columns, mask=in_column, other=0) != 0)[:, None, :]
    if MODE == 2:
        low = tl.load(column_top + columns, mask=in_column, other=0.0)
        low = tl.where(low == _NONE, 0.0, low)
    total = tl.full([C, BP, W], _NONE if MODE == 1 else 0.0, tl.float32)
    begin = tl.program_id(2) * per_program
    count = tl.minimum(per_program, num_leads - begin)
    for i in range(count):
        # Everyone starts elsewhere, so that not all add to the same rows at the same time.
        lead = first_lead + begin + (i + tl.program_id(0)) % count
        first, second, positive_row, positive_column = _place(lead, B, block, q, SR, BP, THREE)
        side = tl.load(tables + first * Q + columns, mask=in_column, other=0.0)
        if THREE:
            side += tl.load(tables + B * Q + second * Q + columns, mask=in_column, other=0.0)
        own = tl.load(a + lead * B + rows, mask=in_row, other=0.0)
        s = held + side[:, None, :] + own[None, :, None]
        if ROOT:
            root = tl.maximum(s, _TINY) * tl.rsqrt(tl.maximum(s, _TINY))
            s = (
                root if MODE == 0 else tl.where(s == s, root, s)
            )  # a NaN must come through; where z is bounded there is none
        z = s * factor - middle if MODE == 0 else s * factor
        near = (positive_row >= 0) & (positive_row < BP) & (positive_column >= 0) & (positive_column < C * W)
        if near | (not EVEN) | MASKED:
            here = _kept(kept, row, column, positive_row, positive_column, C, W)
            if MASKED:
                here &= (tl.load(row_keep + lead * B + rows, mask=in_row, other=0) != 0)[None, :, None]
            z = tl.where(here, z, _NONE)
        where = lead * B + rows
        if MODE == 0:
            e = tl.exp2(z)
            total += e
            tl.atomic_add(row_sum + where, tl.sum(tl.sum(e, 0), 1), mask=in_row, sem="relaxed")
        elif MODE == 1:
            total = tl.maximum(total, z)
            tl.atomic_max(row_top + where, tl.max(tl.max(z, 0), 1), mask=in_row, sem="relaxed")
        else:
            high = tl.load(row_top + where, mask=in_row, other=0.0)
            high = tl.where(high == _NONE, 0.0, high)
            total += tl.exp2(z - low[:, None, :])
            e = tl.exp2(z - high[None, :, None])
            tl.atomic_add(row_sum + where, tl.sum(tl.sum(e, 0), 1), mask=in_row, sem="relaxed")
    if MODE == 1:
        tl.atomic_max(column_top + columns, tl.max(total, 1), mask=in_column, sem="relaxed")
    else:
        tl.atomic_add(column_sum + columns, tl.sum(total, 1), mask=in_column, sem="relaxed")


@triton.jit
def gram_weights(
    a,
    b,
    tables,
    row_keep,
    column_keep,
    row_shift,
    row_weight,
    column_shift,
    column_weight,
    settings,
    grad_a,
    grad_tables,
    B,
    Q,
    SR,
    first_lead,
    num_leads,
    per_program,
    FAST: tl.constexpr,
    ROOT: tl.constexpr,
    THREE: tl.constexpr,
    MASKED: tl.constexpr,
    EVEN: tl.constexpr,
    C: tl.constexpr,
    BP: tl.constexpr,
    W: tl.constexpr,
):
    """Gradients of ``a`` and of the tables; that of ``b`` is the sum of the last table's over its rows.

    The weight of a tuple is ``v exp2(z - r) + w exp2(z - c)``, shifts r, c and weights v, w of its row and column
    (FAST: ``exp2(z - middle) (v + w)``), over the root if there is one.
    """
    if (tl.load(settings + 1) != 0) != FAST:
        return
    factor = tl.load(settings)
    middle = tl.load(settings + 2)
    q = tl.program_id(0) * (C * W)
    block = tl.program_id(1) * BP
    column = tl.arange(0, C)[:, None] * W + tl.arange(0, W)[None, :]
    row = tl.arange(0, BP)
    columns, rows = q + column, block + row
    in_column, in_row = columns < Q, rows < B
    at_last = (2 * B * Q if THREE else B * Q) + rows[None, :, None] * Q + columns[:, None, :]
    inside = in_row[None, :, None] & in_column[:, None, :]
    held = tl.load(tables + at_last, mask=inside, other=0.0)
    held += tl.load(b + columns, mask=in_column, other=0.0)[:, None, :]
    kept = inside
    if MASKED:
        kept &= (tl.load(column_keep + columns, mask=in_column, other=0) != 0)[:, None, :]
    w = tl.load(column_weight + columns, mask=in_column, other=0.0)
    if not FAST:
        c = tl.load(column_shift + columns, mask=in_column, other=0.0)
    grad = tl.zeros([C, BP, W], tl.float32)
    begin = tl.program_id(2) * per_program
    count = tl.minimum(per_program, num_leads - begin)
    for i in range(count):
        lead = first_lead + begin + (i + tl.program_id(0)) % count
        first, second, positive_row, positive_column = _place(lead, B, block, q, SR, BP, THREE)
        side = tl.load(tables + first * Q + columns, mask=in_column, other=0.0)
        if THREE:
            side += tl.load(tables + B * Q + second * Q + columns, mask=in_column, other=0.0)
        own = tl.load(a + lead * B + rows, mask=in_row, other=0.0)
        v = tl.load(row_weight + lead * B + rows, mask=in_row, other=0.0)
        s = held + side[:, None, :] + own[None, :, None]
        if ROOT:
            inverse = tl.where(s <= 0, 0.0, tl.rsqrt(tl.maximum(s, _TINY)))
            s = s * inverse
        z = s * factor
        if FAST:
            e = tl.exp2(z - middle) * (v[None, :, None] + w[:, None, :])
        else:
            r = tl.load(row_shift + lead * B + rows, mask=in_row, other=0.0)
            e = v[None, :, None] * tl.exp2(z - r[None, :, None]) + w[:, None, :] * tl.exp2(z - c[:, None, :])
        near = (positive_row >= 0) & (positive_row < BP) & (positive_column >= 0) & (positive_column < C * W)
        if near | (not EVEN) | MASKED:
            here = _kept(kept, row, column, positive_row, positive_column, C, W)
            if MASKED:
                here &= (tl.load(row_keep + lead * B + rows, mask=in_row, other=0) != 0)[None, :, None]
            e = tl.where(here, e, 0.0)
        if ROOT:
            e = e * inverse
        grad += e
        down = tl.sum(tl.sum(e, 0), 1)
        across = tl.sum(e, 1)
        tl.atomic_add(grad_a + lead * B + rows, down, mask=in_row, sem="relaxed")
        tl.atomic_add(grad_tables + first * Q + columns, across, mask=in_column, sem="relaxed")
        if THREE:
            tl.atomic_add(grad_tables + B * Q + second * Q + columns, across, mask=in_column, sem="relaxed")
    tl.atomic_add(grad_tables + at_last, grad, mask=inside, sem="relaxed")
