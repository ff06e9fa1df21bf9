"""The Triton kernels of the two-sided stream: super-rows, one pass over all logits, and the weights of a block.

The logits are ``z[p, q] = c f(a_p + b_q + <X_p, Y_q>)`` with ``f`` the identity or the square root, in units of ln 2 so
that ``exp2`` needs no extra product. Every sum is taken in a fixed order (partial results per tile, merged by
`row_kernels.merge_partials`; no atomics), so that equal inputs give equal bits.

``settings`` is a device tensor ``[c log2(e), fast, 0, c]``, so that nobody waits for a bound. The weights have both
forms in one kernel; of the forward pass, where that would take the registers of both, the host launches the FAST form
and the safe one, and the one that does not apply returns at once:

- FAST, where every ``|z|`` is known to be small: one exponential serves the row sum and the column sum.
- safe: each row and each column has its own maximum, two exponentials per logit, no overflow at any scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trimtab.losses.triton.row_kernels import round_tf32

_NONE = tl.constexpr(float("-inf"))
_TINY = tl.constexpr(1e-37)
_ANY = ("num_blocks", "num_strips", "strip", "group")  # compiled once for all of them


@triton.jit
def _similar(
    x_rows,
    y_rows,
    row,
    column,
    D: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """``<X_p, Y_q>`` of one tile."""
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, D, BK):
        total = tl.dot(x_rows.load([row, k]), y_rows.load([column, k]).T, total, input_precision=PRECISION)
    return total


@triton.jit
def _place(program, num_blocks, num_strips, group):
    """The block of columns and the strip of a program.

    What runs at the same time are the strips of `group` neighbouring blocks: few rows and few columns, each of them
    read by many programs while it is in the cache.
    """
    first = (program // (group * num_strips)) * group
    wide = tl.minimum(group, num_blocks - first)
    rest = program % (group * num_strips)
    return first + rest % wide, rest // wide


@triton.jit
def _positives(row, column, SL, SR, BM: tl.constexpr, BN: tl.constexpr):
    """Whether the tile that begins at super-rows (row, column) holds a positive: ``(i SL, i SR)``."""
    low = tl.maximum(tl.cdiv(row, SL), tl.cdiv(column, SR))
    high = tl.minimum((row + BM - 1) // SL, (column + BN - 1) // SR)
    return low <= high


@triton.jit
def _kept(rows, columns, P, Q, row_keep, column_keep, shift, SL, SR, MASKED: tl.constexpr):
    """Which tuples of a tile exist and are negatives."""
    positive = tl.where((shift + rows) % SL == 0, ((shift + rows) // SL) * SR, -1)
    kept = (columns[None, :] != positive[:, None]) & (rows < P)[:, None] & (columns < Q)[None, :]
    if MASKED:
        kept &= (tl.load(row_keep + rows, mask=rows < P, other=0) != 0)[:, None]
        kept &= (tl.load(column_keep + columns, mask=columns < Q, other=0) != 0)[None, :]
    return kept


@triton.jit(do_not_specialize=_ANY)
def forward_tiles(
    x_rows,
    y_rows,
    a,
    b,
    row_keep,
    column_keep,
    settings,
    row_parts,
    column_parts,
    P,
    begin_column,
    Q,
    shift,
    SL,
    SR,
    num_blocks,
    num_strips,
    strip,
    group,
    D: tl.constexpr,
    FAST: tl.constexpr,
    ADD: tl.constexpr,
    ROOT: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    FLAT: tl.constexpr,
    WARPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Row and column log-sum-exps (base 2) of a strip of tiles: one block of columns against `strip` blocks of rows.

    Columns from `begin_column` to Q, all rows; they are super-rows `shift` and on. ``row_parts [blocks of columns, P]``
    gets one value per row and tile, ``column_parts [strips, columns]`` one per column.
    In the FAST form the sum over the rows is kept per thread until the end: `tl.sum` over the axes that one thread owns
    (rows r and r + 8 of a matrix-unit tile, and its repetitions) costs an addition, over all rows it costs shuffles.
    """
    if (tl.load(settings + 1) != 0) != FAST:
        return
    factor = tl.load(settings)
    block, part = _place(tl.program_id(0), num_blocks, num_strips, group)
    column = begin_column + block * BN
    columns = column + tl.arange(0, BN)
    own = tl.zeros([WARPS, 8, BN], tl.float32)
    top = tl.full([BN], _NONE, tl.float32)
    below = tl.zeros([BN], tl.float32)
    if ADD:
        right = tl.load(b + columns, mask=columns < Q, other=0.0)
    for t in tl.range(part * strip, tl.minimum(part * strip + strip, tl.cdiv(P, BM)), flatten=FLAT):
        row = t * BM
        rows = row + tl.arange(0, BM)
        s = _similar(x_rows, y_rows, row, column, D, BM, BN, BK, PRECISION)
        if ADD:
            s += tl.load(a + rows, mask=rows < P, other=0.0)[:, None] + right[None, :]
        if ROOT:
            s = tl.where(s <= 0, 0.0, tl.sqrt(s))
        z = s * factor
        edge = (row + BM > P) | (column + BN > Q)
        if edge | MASKED | _positives(shift + row, column, SL, SR, BM, BN):
            kept = _kept(rows, columns, P, Q, row_keep, column_keep, shift, SL, SR, MASKED)
            z = tl.where(kept, z, _NONE)
        where = row_parts + block.to(tl.int64) * P + rows
        if FAST:
            e = tl.exp2(z)
            tl.store(where, tl.log2(tl.sum(e, 1)), mask=rows < P)
            own += tl.sum(tl.sum(tl.reshape(e, [BM // (16 * WARPS), WARPS, 2, 8, BN]), 0), 1)
        else:
            high = tl.max(z, 1)
            high = tl.where(high == _NONE, 0.0, high)
            tl.store(where, high + tl.log2(tl.sum(tl.exp2(z - high[:, None]), 1)), mask=rows < P)
            new = tl.maximum(top, tl.max(z, 0))
            level = tl.where(new == _NONE, 0.0, new)
            below = below * tl.exp2(top - level) + tl.sum(tl.exp2(z - level[None, :]), 0)
            top = new
    if FAST:
        result = tl.log2(tl.sum(tl.sum(own, 0), 0))
    else:
        result = tl.where(top == _NONE, 0.0, top) + tl.log2(below)
    where = column_parts + part.to(tl.int64) * (Q - begin_column) - begin_column
    tl.store(where + columns, result, mask=columns < Q)


@triton.jit
def _halves(x):
    """The left and the right half of a tile's columns: no value changes its thread."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
def _weigh_part(
    weights,
    s,
    v,
    w,
    row_shifts,
    column_shifts,
    column_sums,
    row_keep,
    column_keep,
    factor,
    fast,
    rare,
    begin_row,
    row,
    P,
    begin_column,
    column,
    Q,
    shift,
    SL,
    SR,
    ADD: tl.constexpr,
    ROOT: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    PARTS: tl.constexpr,
):
    """The weights of one tile of similarities go to memory, in PARTS pieces; of each row the sum of weight times
    similarity and the sum of weights come back.

    A piece waits in a buffer of its size, as shared memory is scarce; meanwhile the next piece is computed.
    """
    if PARTS > 1:
        HALF: tl.constexpr = s.shape[1] // 2
        s_left, s_right = _halves(s)
        w_left, w_right = _halves(w)
        moment, total = _weigh_part(
            weights, s_left, v, w_left, row_shifts, column_shifts, column_sums, row_keep, column_keep, factor, fast,
            rare, begin_row, row, P, begin_column, column, Q, shift, SL, SR, ADD, ROOT, MASKED, PRECISION, PARTS // 2,
        )  # fmt: skip
        other_moment, other = _weigh_part(
            weights, s_right, v, w_right, row_shifts, column_shifts, column_sums, row_keep, column_keep, factor, fast,
            rare, begin_row, row, P, begin_column, column + HALF, Q, shift, SL, SR, ADD, ROOT, MASKED, PRECISION,
            PARTS // 2,
        )  # fmt: skip
        return moment + other_moment, total + other
    else:  # noqa: RET505 - the compiler compiles what follows a return
        rows = row + tl.arange(0, s.shape[0])
        columns = column + tl.arange(0, s.shape[1])
        if ROOT:
            inverse = tl.where(s <= 0, 0.0, tl.rsqrt(tl.maximum(s, _TINY)))
            s = s * inverse
        z = s * factor
        if fast:
            e = tl.exp2(z) * (v + w)
        else:
            r = tl.load(row_shifts + rows, mask=rows < P, other=0.0)[:, None]
            c = tl.load(column_shifts + columns, mask=columns < Q, other=0.0)[None, :]
            e = v * tl.exp2(z - r) + w * tl.exp2(z - c)
        if rare:
            kept = _kept(rows, columns, P, Q, row_keep, column_keep, shift, SL, SR, MASKED)
            e = tl.where(kept, e, 0.0)
        moment = tl.zeros([s.shape[0]], tl.float32)
        total = tl.zeros([s.shape[0]], tl.float32)
        if ADD:
            moment = tl.sum(e * s, 1)
            if ROOT:
                e = e * (0.5 * inverse)
            total = tl.sum(e, 1)
            tl.store(column_sums + columns - begin_column, tl.sum(e, 0), mask=columns < Q)
        if weights.dtype == tl.float32 and PRECISION == "tf32":
            e = round_tf32(e)
        weights.store([row - begin_row, column - begin_column], e.to(weights.dtype))
        return moment, total


@triton.jit(do_not_specialize=_ANY)
def weight_tiles(
    x_rows,
    y_rows,
    weights,
    a,
    b,
    row_keep,
    column_keep,
    row_pulls,
    column_pulls,
    settings,
    sums,
    moments,
    column_sums,
    num_rows,
    num_columns,
    begin_row,
    P,
    begin_column,
    Q,
    shift,
    SL,
    SR,
    num_blocks,
    num_strips,
    strip,
    group,
    D: tl.constexpr,
    ADD: tl.constexpr,
    ROOT: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    FLAT: tl.constexpr,
    PARTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """The weights of a block of tuples: ``v exp2(z - r) + w exp2(z - c)`` with shifts r, c and weights v, w.

    Rows from `begin_row` to P, columns from `begin_column` to Q. ``row_pulls [3, num_rows]`` holds shifts, weights, and
    the weights of the fast form ``exp2(z) (v + w)``, which have the shifts inside. ROOT: divided by ``2 sqrt(q)``, the
    derivative. ADD also leaves per tile the sums over the rows, over the columns, and over the columns of weight times
    similarity.
    """
    fast = tl.load(settings + 1) != 0
    factor = tl.load(settings)
    block, part = _place(tl.program_id(0), num_blocks, num_strips, group)
    column = begin_column + block * BN
    columns = column + tl.arange(0, BN)
    kind = tl.where(fast, 2, 1)
    row_weights = row_pulls + kind * num_rows
    w = tl.load(column_pulls + kind * num_columns + columns, mask=columns < Q, other=0.0)
    if ADD:
        right = tl.load(b + columns, mask=columns < Q, other=0.0)
    for t in tl.range(part * strip, tl.minimum(part * strip + strip, tl.cdiv(P - begin_row, BM)), flatten=FLAT):
        row = begin_row + t * BM
        rows = row + tl.arange(0, BM)
        s = _similar(x_rows, y_rows, row, column, D, BM, BN, BK, PRECISION)
        v = tl.load(row_weights + rows, mask=rows < P, other=0.0)
        if ADD:
            s += tl.load(a + rows, mask=rows < P, other=0.0)[:, None] + right[None, :]
        edge = (row + BM > P) | (column + BN > Q)
        rare = edge | MASKED | _positives(shift + row, column, SL, SR, BM, BN)
        moment, total = _weigh_part(
            weights, s, v[:, None], w[None, :], row_pulls, column_pulls, column_sums + t * (Q - begin_column), row_keep,
            column_keep, factor, fast, rare, begin_row, row, P, begin_column, column, Q, shift, SL, SR, ADD, ROOT,
            MASKED, PRECISION, PARTS,
        )  # fmt: skip
        if ADD:
            where = block.to(tl.int64) * (P - begin_row) + rows - begin_row
            tl.store(moments + where, moment, mask=rows < P)
            tl.store(sums + where, total, mask=rows < P)


@triton.jit
def add_product(
    left,
    right,
    out,
    M,
    N,
    stride,
    K,
    TURNED: tl.constexpr,
    FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """``out [M, N] += left right`` (``left.T right`` if TURNED; ``=`` if FIRST), in a precision of our own choice."""
    row, column = tl.program_id(0) * BM, tl.program_id(1) * BN
    total = tl.zeros([BM, BN], tl.float32)
    for k in range(0, K, BK):
        if TURNED:
            x = left.load([k, row]).T
        else:
            x = left.load([row, k])
        total = tl.dot(x, right.load([k, column]), total, input_precision=PRECISION)
    rows, columns = row + tl.arange(0, BM), column + tl.arange(0, BN)
    where = out + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    inside = (rows < M)[:, None] & (columns < N)[None, :]
    if not FIRST:
        total += tl.load(where, mask=inside, other=0.0)
    tl.store(where, total, mask=inside)
