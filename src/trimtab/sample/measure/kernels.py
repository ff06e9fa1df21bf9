"""The Triton kernels: every statistic of every gradient in one pass over memory, reduced in a fixed order.

Three launches, whatever the number of tensors:

- `chunk_stats` reads each chunk of each tensor once. Per element it spends few operations, so that memory stays the
  limit: the maximum is taken over the bits of the magnitude, which finds NaN and Inf too, and both counts share one
  integer. Only a chunk whose maximum is non-finite, huge or tiny is looked at again, in float64.
- `row_stats` adds up the chunks of each tensor in their order: the result does not depend on scheduling.
- `global_stats` adds up the tensors and decides: norm, clip coefficient, reject flag. Nothing comes back to the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

NUM_PARTS = tl.constexpr(7)  # sum of squares, sum, maximum, NaN, Inf, zeros, below float16
_FLIP = tl.constexpr(0x7FFFFFFF)
_HUGE = tl.constexpr(0x5D800000)  # 2**60: squares of more than that may overflow a float32 sum
_TINY = tl.constexpr(0x21800000)  # 2**-60: squares of less than that are lost
_SMALL = tl.constexpr(0x33800000)  # 2**-24: the smallest float16


@triton.jit
def chunk_stats(
    addresses,
    chunk_row,
    first_chunk,
    numel,
    parts,
    num_chunks,
    BLOCK: tl.constexpr,
    ITERS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    STRIP: tl.constexpr,
):
    """Raw moments of one chunk of one tensor."""
    pid = tl.program_id(0)
    row = tl.load(chunk_row + pid)
    start = (pid - tl.load(first_chunk + row)).to(tl.int64) * (BLOCK * ITERS)
    left = tl.load(numel + row) - start
    base = tl.load(addresses + row).to(tl.pointer_type(DTYPE)) + start
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    largest = tl.zeros([BLOCK], tl.int32)
    counts = tl.zeros([BLOCK], tl.int32)
    padded = 0
    if left >= BLOCK * ITERS:
        for i in range(ITERS):
            x = tl.load(base + i * BLOCK + lane).to(tl.float32)
            bits = x.to(tl.int32, bitcast=True) & _FLIP
            squares += x * x
            sums += x
            largest = tl.maximum(largest, bits)
            counts += (bits == 0).to(tl.int32) + ((bits < _SMALL).to(tl.int32) << 16)
    else:
        blocks = tl.cdiv(left, BLOCK).to(tl.int32)
        padded = (blocks * BLOCK - left).to(tl.int32)
        for i in range(blocks):
            x = tl.load(base + i * BLOCK + lane, mask=i * BLOCK + lane < left, other=0.0).to(tl.float32)
            bits = x.to(tl.int32, bitcast=True) & _FLIP
            squares += x * x
            sums += x
            largest = tl.maximum(largest, bits)
            counts += (bits == 0).to(tl.int32) + ((bits < _SMALL).to(tl.int32) << 16)
    top = tl.max(largest)
    out = parts + pid
    tl.store(out, tl.sum(squares).to(tl.float64))
    tl.store(out + num_chunks, tl.sum(sums).to(tl.float64))
    tl.store(out + 2 * num_chunks, top.to(tl.float32, bitcast=True).to(tl.float64))
    tl.store(out + 3 * num_chunks, 0.0)
    tl.store(out + 4 * num_chunks, 0.0)
    tl.store(out + 5 * num_chunks, (tl.sum(counts & 0xFFFF) - padded).to(tl.float64))
    tl.store(out + 6 * num_chunks, (tl.sum(counts >> 16) - padded).to(tl.float64))
    if (top >= _HUGE) | ((top < _TINY) & (top > 0)):
        # Rare: a bad value, or squares that do not fit a float32. Look again, wide, and count what is there. In narrow
        # strips: a wide one would claim registers that the common path then lacks, and halve its speed.
        strip = tl.arange(0, STRIP)
        wide_square = tl.zeros([STRIP], tl.float64)
        wide_sum = tl.zeros([STRIP], tl.float64)
        nans = tl.zeros([STRIP], tl.int32)
        infs = tl.zeros([STRIP], tl.int32)
        for i in range(tl.cdiv(tl.minimum(left, BLOCK * ITERS), STRIP).to(tl.int32)):
            x = tl.load(base + i * STRIP + strip, mask=i * STRIP + strip < left, other=0.0).to(tl.float32)
            bits = x.to(tl.int32, bitcast=True) & _FLIP
            nans += (bits > 0x7F800000).to(tl.int32)
            infs += (bits == 0x7F800000).to(tl.int32)
            wide = x.to(tl.float64)
            wide_square += wide * wide
            wide_sum += wide
        tl.store(out, tl.sum(wide_square))
        tl.store(out + num_chunks, tl.sum(wide_sum))
        tl.store(out + 3 * num_chunks, tl.sum(nans).to(tl.float64))
        tl.store(out + 4 * num_chunks, tl.sum(infs).to(tl.float64))


@triton.jit
def row_stats(
    parts,
    first_chunk,
    numel,
    table_row,
    scale,
    table,
    square_of_row,
    num_chunks,
    place,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    """The columns of one tensor from its chunks, added in their order."""
    pid = tl.program_id(0)
    first = tl.load(first_chunk + pid)
    size = tl.load(numel + pid)
    count = tl.cdiv(size, CHUNK).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    sums = tl.zeros([BLOCK], tl.float64)
    largest = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.float64)
    infs = tl.zeros([BLOCK], tl.float64)
    zeros = tl.zeros([BLOCK], tl.float64)
    below = tl.zeros([BLOCK], tl.float64)
    for i in range(tl.cdiv(count, BLOCK)):
        here = i * BLOCK + lane
        inside = here < count
        at = parts + first + here
        squares += tl.load(at, mask=inside, other=0.0)
        sums += tl.load(at + num_chunks, mask=inside, other=0.0)
        top = tl.load(at + 2 * num_chunks, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, top.to(tl.int32, bitcast=True) & _FLIP)
        nans += tl.load(at + 3 * num_chunks, mask=inside, other=0.0)
        infs += tl.load(at + 4 * num_chunks, mask=inside, other=0.0)
        zeros += tl.load(at + 5 * num_chunks, mask=inside, other=0.0)
        below += tl.load(at + 6 * num_chunks, mask=inside, other=0.0)
    square = tl.sum(squares)
    total = tl.sum(sums)
    largest_value = tl.max(largest).to(tl.float32, bitcast=True).to(tl.float64)
    num_nan = tl.sum(nans)
    num_inf = tl.sum(infs)
    elements = tl.maximum(size, 1).to(tl.float64)
    inverse = tl.full([], 1.0, tl.float64)
    if SCALED:
        inverse = 1.0 / tl.load(scale).to(tl.float64)
    norm = tl.sqrt(square) * inverse
    out = table + tl.load(table_row + pid) * NUM_PARTS
    tl.store(out, norm.to(tl.float32))
    tl.store(out + 1, (largest_value * inverse).to(tl.float32))
    tl.store(out + 2, (total / elements * inverse).to(tl.float32))
    tl.store(out + 3, num_nan.to(tl.float32))
    tl.store(out + 4, num_inf.to(tl.float32))
    tl.store(out + 5, (tl.sum(zeros) / elements).to(tl.float32))
    tl.store(out + 6, ((tl.sum(below) - tl.sum(zeros)) / elements).to(tl.float32))
    tl.store(square_of_row + place + pid, square * inverse * inverse)


@triton.jit
def global_stats(
    square_of_row,
    out,
    num_rows,
    max_norm,
    reject_above,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    REJECT: tl.constexpr,
):
    """Norm, non-finite flag, reject flag, clip coefficient and its inverse, from the squares of all tensors."""
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    for i in range(tl.cdiv(num_rows, BLOCK)):
        here = i * BLOCK + lane
        squares += tl.load(square_of_row + here, mask=here < num_rows, other=0.0)
    norm = tl.sqrt(tl.sum(squares))
    # A sum of squares in float64 is finite exactly when every value is.
    bad = (norm != norm) | (norm == float("inf"))
    reject = (norm > reject_above) & (bad == 0)
    if REJECT:
        reject = reject | bad
    coef = tl.full([], 1.0, tl.float64)
    if CLIP:
        wanted = max_norm / (norm + 1e-6)
        coef = tl.where(bad | (wanted >= 1.0), 1.0, wanted)
    tl.store(out, norm.to(tl.float32))
    tl.store(out + 1, bad.to(tl.float32))
    tl.store(out + 2, reject.to(tl.float32))
    tl.store(out + 3, coef.to(tl.float32))
    tl.store(out + 4, (1.0 / coef).to(tl.float32))


@triton.jit
def scale_chunks(
    addresses,
    chunk_row,
    first_chunk,
    numel,
    factor,
    BLOCK: tl.constexpr,
    ITERS: tl.constexpr,
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Multiply one chunk in place by a factor on the device; where it is 1, memory is not touched at all."""
    value = tl.load(factor)
    if value < 1.0:
        pid = tl.program_id(0)
        row = tl.load(chunk_row + pid)
        start = (pid - tl.load(first_chunk + row)).to(tl.int64) * (BLOCK * ITERS)
        left = tl.load(numel + row) - start
        base = tl.load(addresses + row).to(tl.pointer_type(DTYPE)) + start
        if ALIGNED:
            base = tl.multiple_of(base, 16)
        lane = tl.arange(0, BLOCK)
        for i in range(ITERS):
            inside = i * BLOCK + lane < left
            x = tl.load(base + i * BLOCK + lane, mask=inside, other=0.0).to(tl.float32)
            tl.store(base + i * BLOCK + lane, (x * value).to(DTYPE), mask=inside)
