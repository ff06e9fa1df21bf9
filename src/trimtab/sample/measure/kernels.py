"""The Triton kernels: every statistic of every gradient in one pass over memory, reduced in a fixed order.

Three launches, whatever the number of tensors (and a few small ones around them):

- `chunk_stats` reads each chunk of each tensor once. Per element it spends few operations, so that memory stays the
  limit: the maximum is taken over the bits of the magnitude, which finds NaN and Inf too, and both counts share one
  integer. Only a chunk whose maximum is non-finite, huge or tiny is looked at again, in float64.
- `row_stats` adds up the chunks of each tensor in their order: the result does not depend on scheduling.
- `global_stats` adds up the tensors and decides: norm, clip coefficient, reject flag. Nothing comes back to the host.

What differs from step to step (addresses, limits) is read from memory, not from arguments: the same launches can then
be replayed as one CUDA graph.
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
    scale_at,
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
        inverse = 1.0 / tl.load(tl.load(scale_at).to(tl.pointer_type(tl.float32))).to(tl.float64)
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
    limits,
    BLOCK: tl.constexpr,
    CLIP: tl.constexpr,
    REJECT: tl.constexpr,
):
    """Norm, non-finite flag, reject flag, clip coefficient and its inverse, from the squares of all tensors.

    `limits` holds the norm to clip to, the norm to reject above, and the norm up to which nothing is clipped.
    """
    lane = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float64)
    for i in range(tl.cdiv(num_rows, BLOCK)):
        here = i * BLOCK + lane
        squares += tl.load(square_of_row + here, mask=here < num_rows, other=0.0)
    norm = tl.sqrt(tl.sum(squares))
    # A sum of squares in float64 is finite exactly when every value is.
    bad = (norm != norm) | (norm == float("inf"))
    reject = (norm > tl.load(limits + 1)) & (bad == 0)
    if REJECT:
        reject = reject | bad
    coef = tl.full([], 1.0, tl.float64)
    if CLIP:
        wanted = tl.load(limits) / (norm + 1e-6)
        spared = norm.to(tl.float32).to(tl.float64) <= tl.load(limits + 2)
        coef = tl.where(bad | spared | (wanted >= 1.0), 1.0, wanted)
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


@triton.jit
def _count_bad(at, size, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """How many of a program's share of the values are not finite; the programs take turns, block by block."""
    pid, num = tl.program_id(0), tl.num_programs(0)
    lane = tl.arange(0, BLOCK)
    bad = tl.zeros([BLOCK], tl.int32)
    base = at.to(tl.pointer_type(DTYPE))
    for i in range(tl.cdiv(tl.cdiv(size, BLOCK), num).to(tl.int32)):
        here = (i * num + pid) * BLOCK + lane
        x = tl.load(base + here, mask=here < size, other=0.0).to(tl.float32)
        bad += ((x.to(tl.int32, bitcast=True) & _FLIP) >= 0x7F800000).to(tl.int32)
    return tl.sum(bad).to(tl.float32)


@triton.jit
def _mean_square(at, size, DTYPE: tl.constexpr, LEAD: tl.constexpr):
    """Of the leading values."""
    lane = tl.arange(0, LEAD)
    x = tl.load(at.to(tl.pointer_type(DTYPE)) + lane, mask=lane < size, other=0.0).to(tl.float32)
    return tl.sum(x * x) / tl.minimum(size, LEAD).to(tl.float32)


@triton.jit
def _copy_words(told, lead, WORDS: tl.constexpr):
    """The beginnings of the first two samples, bit by bit; of the second nothing where there is none."""
    first = tl.load(told).to(tl.pointer_type(tl.int32))
    num, second = tl.load(told + 3), tl.load(told + 4)
    lane = tl.arange(0, WORDS)
    inside = lane < num
    tl.store(lead + lane, tl.load(first + lane, mask=inside, other=0), mask=inside)
    inside = lane < tl.minimum(num, second)
    tl.store(lead + WORDS + lane, tl.load(first + second + lane, mask=inside, other=0), mask=inside)


@triton.jit
def input_stats(told, found, lead, LEAD: tl.constexpr, LARGE: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    """The root mean square of a batch's leading values, and how many of its values are not finite, share by share.

    `told` holds its address, its number of values, its type (0: no floats, 1 to 3: float32, bfloat16, float16), how
    many words of 4 bytes of its beginning are wanted, and how many of them its second sample lies behind the first.
    """
    pid = tl.program_id(0)
    at, num, kind = tl.load(told), tl.load(told + 1), tl.load(told + 2)
    size = tl.minimum(num, LARGE)
    bad = 0.0
    square = 0.0
    if kind == 1:
        bad = _count_bad(at, size, tl.float32, BLOCK)
        if pid == 0:
            square = _mean_square(at, size, tl.float32, LEAD)
    if kind == 2:
        bad = _count_bad(at, size, tl.bfloat16, BLOCK)
        if pid == 0:
            square = _mean_square(at, size, tl.bfloat16, LEAD)
    if kind == 3:
        bad = _count_bad(at, size, tl.float16, BLOCK)
        if pid == 0:
            square = _mean_square(at, size, tl.float16, LEAD)
    tl.store(found + 1 + pid, bad)
    if pid == 0:
        tl.store(found, tl.sqrt(square))
    if pid == 1:
        _copy_words(told, lead, WORDS)


@triton.jit
def _vector(told, i, num, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    """One of four vectors; zeros where there is none."""
    at = tl.load(told + i)
    lane = tl.arange(0, SIZE)
    inside = lane < tl.where(at != 0, num, 0)
    return tl.load(at.to(tl.pointer_type(DTYPE)) + lane, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _products(told, num, out, DTYPE: tl.constexpr, SIZE: tl.constexpr):
    a, b = _vector(told, 0, num, DTYPE, SIZE), _vector(told, 1, num, DTYPE, SIZE)
    c, d = _vector(told, 2, num, DTYPE, SIZE), _vector(told, 3, num, DTYPE, SIZE)
    tl.store(out, tl.sum(a * a))
    tl.store(out + 1, tl.sum(a * b))
    tl.store(out + 2, tl.sum(b * b))
    tl.store(out + 3, tl.sum(a * c))
    tl.store(out + 4, tl.sum(b * c))
    tl.store(out + 5, tl.sum(c * c))
    tl.store(out + 6, tl.sum(a * d))
    tl.store(out + 7, tl.sum(d * d))


@triton.jit
def products(told, out, SIZE: tl.constexpr):
    """Eight products of four vectors with each other (`sample.probes.sentinel` says what for).

    `told` holds their addresses (0: none), how many values each has, and their type.
    """
    num, kind = tl.load(told + 4), tl.load(told + 5)
    if kind == 1:
        _products(told, num, out, tl.float32, SIZE)
    if kind == 2:
        _products(told, num, out, tl.bfloat16, SIZE)
    if kind == 3:
        _products(told, num, out, tl.float16, SIZE)


@triton.jit
def send(
    values,
    num_values,
    found,
    others,
    out,
    counter,
    width,
    num_places,
    BLOCK: tl.constexpr,
    NUM_SHARES: tl.constexpr,
    NUM_DOTS: tl.constexpr,
    NUM_OTHERS: tl.constexpr,
    INPUT: tl.constexpr,
    DOTS: tl.constexpr,
    RING: tl.constexpr,
):
    """Put measured values, what `input_stats` and `products` found, and single numbers from anywhere side by side.

    `others` holds the addresses of the single numbers; 0: none. With RING the place depends on a counter on the device.
    """
    pid = tl.program_id(0)
    if RING:
        out += (tl.load(counter) % num_places) * width
    here = pid * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + here, tl.load(values + here, mask=here < num_values), mask=here < num_values)
    if pid == 0:
        if INPUT:
            bad = tl.sum(tl.load(found + 1 + tl.arange(0, NUM_SHARES)))
            tl.store(out + num_values, tl.load(found))
            tl.store(out + num_values + 1, (bad > 0).to(tl.float32))
        if DOTS:
            dot = tl.arange(0, NUM_DOTS)
            tl.store(out + num_values + 2 + dot, tl.load(found + 1 + NUM_SHARES + dot))
        few = tl.arange(0, NUM_OTHERS)
        at = tl.load(others + few)
        one = tl.load(at.to(tl.pointer_type(tl.float32)), mask=at != 0, other=0.0)
        tl.store(out + num_values + 2 + NUM_DOTS + few, one, mask=at != 0)


@triton.jit
def advance(counter):
    """One more place of the ring is filled."""
    tl.store(counter, tl.load(counter) + 1)
