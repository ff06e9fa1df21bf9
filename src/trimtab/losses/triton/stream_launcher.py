"""The two-sided stream on a GPU: all ``B^N`` logits in tiles of one fused kernel, none of them ever in memory.

``z[p, q] = c f(a_p + b_q + <X_p, Y_q>)`` for super-rows p, q (`tuple_reduction.py`): ``mip`` with products of rows, the
additive similarities with sums. The forward pass takes the log-sum-exps of the rows and the columns of a tile while it
is in registers. The backward pass writes the weights of one block of tuples, and the matrix library multiplies them
with the super-rows of both sides: 8 B^N D operations in all. Nothing waits for the host, and no sum depends on
scheduling: equal inputs give equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Context, Kind, Precision, Problem
from trimtab.losses.triton.row_launcher import (
    FORMS,
    Form,
    Side,
    add_own,
    anchors,
    bounds,
    build,
    build_pair,
    fold,
    form_of,
    marginal_sums,
    pulls,
)
from trimtab.losses.tuple_reduction import products_in, share_of

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

SAFE_NATS = 60.0
"""Where ``|z|`` stays below this, ``exp(z)``, its sums and their reciprocals fit a float32 with room to spare."""
BLOCKS = ((8192, 16384), (16384, 16384))
"""Super-rows of both sides whose weights are in memory at a time, of problems of common size and of large ones."""
LARGE = 2**30
"""Tuples from which on a problem is large: the time counts then, not the memory of a larger block."""
LONG = 2**33
"""Tuples from which on a problem is long: it takes 50 ms and more on an H200."""
PARTS_BYTES = 2**26
"""Memory for partial row sums in the forward pass."""
PROGRAMS = 132
"""Programs that run at the same time on a large card where each has a multiprocessor to itself."""
GROUP = 16
"""Blocks of columns whose strips run at the same time: few enough to stay in the cache with the rows of the strips."""
START = 0.3
"""What it takes to start a program, in tiles."""

__all__ = ["available", "block_of", "reduce_tuples", "supports"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """How a kernel cuts its work."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int
    flat: bool = False
    """One loop over all tiles of a program, so that the next tile is fetched during the end of this one."""
    strip: int = 16
    """Tiles of a program at most."""
    parts: int = 1
    """Pieces a tile of weights is written in: smaller buffers leave room for one more stage or program."""
    beside: int = 1
    """Programs that share a multiprocessor."""


_PAIRED = Tiles(bm=128, bn=128, bk=64, warps=4, stages=3, flat=True, strip=32, beside=2)
_ALONE = Tiles(bm=128, bn=128, bk=32, warps=8, stages=3)
TILES: dict[tuple[str, Precision], Tiles] = {
    ("forward", "bf16"): _PAIRED,
    ("weights", "bf16"): replace(_PAIRED, parts=2),
    ("forward", "tf32"): _ALONE,
    ("weights", "tf32"): _ALONE,
    ("forward", "ieee"): _ALONE,
    ("weights", "ieee"): _ALONE,
    ("product", "ieee"): _ALONE,
}
"""By kernel and precision, for any card."""
HOPPER: dict[tuple[str, Precision], Tiles] = {
    ("forward", "tf32"): Tiles(bm=256, bn=128, bk=32, warps=8, stages=4, flat=True, strip=64),
    ("weights", "tf32"): replace(_PAIRED, bk=32, parts=8),
}
"""What is faster on an H100 or H200: other cards have less shared memory. The fastest of `benchmarks/gpu_nway_tune.py`;
for bfloat16 that is what `TILES` has."""
_LARGE = Tiles(bm=256, bn=128, bk=64, warps=8, stages=4, flat=True, strip=64)
HOPPER_LONG: dict[tuple[str, Precision], Tiles] = {
    ("forward", "bf16"): _LARGE,
    ("weights", "bf16"): replace(_LARGE, bm=128, bn=256, parts=4),
}
"""The same from `LONG` tuples on. A card that is busy for long slows down to its power limit: what takes less energy is
faster then, and large tiles read each row less often."""
_DOT: dict[Precision, str] = {"bf16": "tf32", "tf32": "tf32", "ieee": "tf32x3"}


def available(device: torch.device | str) -> bool:
    """Whether the kernels can run there: CUDA, compute capability 8 or more, and a Triton with tensor descriptors.

    Example:
        >>> available("cpu")
        False
    """
    device = torch.device(device)
    return device.type == "cuda" and _installed() and torch.cuda.get_device_capability(device)[0] >= 8


@cache
def _installed() -> bool:
    """Searched for once: every search goes through the file system."""
    return find_spec("triton") is not None and find_spec("triton.tools.tensor_descriptor") is not None


def supports(problem: Problem, kind: Kind) -> bool:
    """Whether `reduce_tuples` can do it: log-sum-exps over float32 rows of a product or additive similarity."""
    return kind == "lse" and problem.similarity in FORMS and problem.xs[0].dtype == torch.float32


def reduce_tuples(problem: Problem, kind: Kind) -> Tensor:
    """``[N, B]`` as `problem.py` says. `chunk` is ignored: the memory needed does not grow with the tuples."""
    if not supports(problem, kind):
        what = f"{kind!r} of {problem.similarity!r} over {problem.xs[0].dtype}"
        raise NotImplementedError(f"the triton backend cannot do {what}; use backend='stream'.")
    result: Tensor = _Stream.apply(problem, problem.scale, *problem.xs)  # type: ignore[no-untyped-call]
    return result


class _StreamContext(Context, Protocol):
    plan: tuple[str, int, Precision, int]
    """Similarity, number of modalities, precision, and the first row of this part."""


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _StreamContext, problem: Problem, scale: Tensor, *xs: Tensor) -> Tensor:
        n, half = len(xs), len(xs) // 2
        form = form_of(problem.similarity, n)
        span = share_of(problem.batch**half, problem.share)
        masks = (None, None) if problem.present is None else (problem.present[:half], problem.present[half:])
        whole = problem.batch ** (n - half)
        if not form.add and span == (0, whole) and problem.present is None:
            left, right = build_pair(xs, form, problem.precision)
        else:
            left = build(xs[:half], masks[0], form, span, problem.precision)
            right = build(xs[half:], masks[1], form, (0, whole), problem.precision, 1 + form.add)
        rows, columns = left.base.new_empty(problem.batch**half), torch.empty_like(right.base)
        settings = left.base.new_empty(0)
        if left.count < len(rows):  # those of other parts, or all there are
            rows.fill_(-torch.inf)
            columns.fill_(-torch.inf)
        if left.count:
            settings = bounds(form, left, right, scale, SAFE_NATS)
            _sums(problem, left, right, settings, rows[slice(*span)], columns)
        values = anchors((rows, columns), n)
        ctx.plan = problem.similarity, n, problem.precision, left.first
        ctx.save_for_backward(scale, values, settings, *left.tensors, *right.tensors)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: _StreamContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        similarity, n, precision, first = ctx.plan
        form, half = form_of(similarity, n), n // 2
        scale, values, settings, *kept = ctx.saved_tensors
        left, right = Side.of(kept[:5], first, 1), Side.of(kept[5:], 0, 1 + form.add)
        if not left.count:
            empty = [torch.zeros_like(x) for side in (left, right) for x in side.parts]
            return None, torch.zeros_like(scale), *empty
        if 2 * half == n and left.count == right.count:
            pull = [*pulls(values, grad, settings, 0, left.count, scaled=True, sides=2)]
        else:
            pull = [
                pulls(values[part], grad[part], settings, side.first, side.count, scaled=True)[0]
                for side, part in ((left, slice(half)), (right, slice(half, n)))
            ]
        raw, sums, moments = _weigh(form, precision, left, right, settings, pull)
        grads = []
        for side, rows, own in zip((left, right), raw, sums, strict=True):
            if form.add:
                add_own(side, rows, own)
            part = fold(side, rows, form)
            if form.less:
                part = part.addcmul(side.parts, marginal_sums(side, own).unsqueeze(-1), value=-2 * form.less)
            grads.append(part)
        moment: Tensor | None = None
        if ctx.needs_input_grad[1]:
            # The sum of weight times similarity. Of a product it is already there: each row times its own gradient.
            own = moments.sum() if form.add else grads[0][0].reshape(-1).dot(left.parts[0].reshape(-1))
            moment = own * form.factor / settings[3]  # the weights had the factor of the logits inside
        return None, moment, *(g for part in grads for g in part.unbind(0))


def _tiles(kernel: str, precision: Precision, left: Side, right: Side) -> Tiles:
    """How `kernel` cuts its work on these sides."""
    key, long = (kernel, precision), left.count * right.count >= LONG
    if not _hopper(left.rows.device):
        return TILES[key]
    return (HOPPER_LONG.get(key) if long else None) or HOPPER.get(key) or TILES[key]


@cache
def _hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def _strips(tiles: Tiles, rows: int, columns: int) -> tuple[int, int, int]:
    """Blocks of columns, strips of row tiles, and tiles in a strip."""
    blocks, down = -(-columns // tiles.bn), -(-rows // tiles.bm)
    strip = _strip(blocks, down, tiles.strip, PROGRAMS * tiles.beside)
    return blocks, -(-down // strip), strip


@cache
def _strip(blocks: int, down: int, most: int, together: int) -> int:
    """Tiles in a strip, at most `most`: the number that ends first where `together` strips run at once."""
    return min(range(1, most + 1), key=lambda strip: -(-blocks * -(-down // strip) // together) * (strip + START))


def _rows_of(tensor: Tensor, *block: int) -> TensorDescriptor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(tensor, list(block))


def _common(form: Form, precision: Precision, side: Side, tiles: Tiles) -> dict[str, bool | int | str]:
    """What both tile kernels are compiled for."""
    return {
        "D": side.rows.shape[1], "ADD": form.add, "ROOT": form.root, "MASKED": side.keep is not None,
        "PRECISION": _DOT[precision], "FLAT": tiles.flat, "BM": tiles.bm, "BN": tiles.bn, "BK": tiles.bk,
        "num_warps": tiles.warps, "num_stages": tiles.stages,
    }  # fmt: skip


def _sums(problem: Problem, left: Side, right: Side, settings: Tensor, rows: Tensor, columns: Tensor) -> None:
    """Base-2 log-sum-exps of all rows and all columns."""
    from trimtab.losses.triton import row_kernels, stream_kernels

    tiles = _tiles("forward", problem.precision, left, right)
    common = _common(form_of(problem.similarity, problem.num_modalities), problem.precision, left, tiles)
    span = max(1, PARTS_BYTES // (4 * left.count)) * tiles.bn
    x_rows, y_rows = _rows_of(left.rows, tiles.bm, tiles.bk), _rows_of(right.rows, tiles.bn, tiles.bk)
    for q in range(0, right.count, span):
        end = min(q + span, right.count)
        blocks, strips, strip = _strips(tiles, left.count, end - q)
        row_parts, column_parts = rows.new_empty(blocks, left.count), rows.new_empty(strips, end - q)
        for fast in (True, False):
            stream_kernels.forward_tiles[(blocks * strips,)](
                x_rows, y_rows, left.base, right.base, left.keep, right.keep, settings, row_parts, column_parts,
                left.count, q, end, left.first, left.stride, right.stride, blocks, strips, strip, GROUP,
                FAST=fast, WARPS=min(tiles.warps, tiles.bm // 16), **common,
            )  # fmt: skip
        for parts, out, first in ((row_parts, rows, q == 0), (column_parts, columns[q:end], True)):
            grid = (-(-out.shape[0] // 64),)
            row_kernels.merge_partials[grid](parts, out, parts.shape[0], out.shape[0], TALL=32, BLOCK=64, FIRST=first)


def _weigh(
    form: Form, precision: Precision, left: Side, right: Side, settings: Tensor, pull: Sequence[Tensor]
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
    """Gradients of the super-rows of both sides, sums of the weights per super-row, sums of weight times similarity."""
    from trimtab.losses.triton import stream_kernels

    tiles = _tiles("weights", precision, left, right)
    common = _common(form, precision, left, tiles)
    raw = left.base.new_empty(left.rows.shape), left.base.new_empty(right.rows.shape)
    # Only the additive similarities have something to add up beside the products.
    sums = (torch.zeros_like(left.base), torch.zeros_like(right.base)) if form.add else (left.base, right.base)
    moments = torch.zeros_like(left.base) if form.add else left.base
    parts, column_parts = left.base.unsqueeze(0), right.base
    high, wide = block_of(left.count, right.count)
    memory = left.rows.new_empty(high, wide)
    x_rows, y_rows = _rows_of(left.rows, tiles.bm, tiles.bk), _rows_of(right.rows, tiles.bn, tiles.bk)
    w_rows = _rows_of(memory, tiles.bm, tiles.bn // tiles.parts)
    # Cut once: a view costs as much time as a small launch.
    tall, tall_out = ([x[p : p + high] for p in range(0, len(x), high)] for x in (left.rows, raw[0]))
    long, long_out = ([x[q : q + wide] for q in range(0, len(x), wide)] for x in (right.rows, raw[1]))
    for i, p in enumerate(range(0, left.count, high)):
        down = slice(p, min(p + high, left.count))
        upright = _upright(tall[i]) if precision == "tf32" else tall[i]
        for j, q in enumerate(range(0, right.count, wide)):
            along = slice(q, min(q + wide, right.count))
            height, width = down.stop - p, along.stop - q
            blocks, strips, strip = _strips(tiles, height, width)
            if form.add:
                parts = moments.new_empty(2, blocks, height)
                column_parts = moments.new_empty(-(-height // tiles.bm), width)
            stream_kernels.weight_tiles[(blocks * strips,)](
                x_rows, y_rows, w_rows, left.base, right.base, left.keep, right.keep, *pull, settings,
                parts[0], parts[-1], column_parts, left.count, right.count, p, down.stop, q, along.stop,
                left.first, left.stride, right.stride, blocks, strips, strip, GROUP,
                PARTS=tiles.parts, **common,
            )  # fmt: skip
            if form.add:
                sums[0][down] += parts[0].sum(0)
                moments[down] += parts[1].sum(0)
                sums[1][along] += column_parts.sum(0)
            weights = memory if (height, width) == (high, wide) else memory[:height, :width]
            _add_product(weights, long[j], tall_out[i], precision, first=q == 0, turned=False)
            _add_product(weights, upright, long_out[j], precision, first=p == 0, turned=True)
    return raw, sums, moments


def block_of(left: int, right: int) -> tuple[int, int]:
    """Super-rows of both sides whose weights are in memory at a time, of so many super-rows."""
    high, wide = BLOCKS[left * right >= LARGE]
    return _evenly(left, high), _evenly(right, wide)


def _evenly(count: int, most: int) -> int:
    """The span, a multiple of 256, that cuts `count` into the fewest near-equal parts of at most `most`."""
    number = -(-count // most)
    return -(-count // (number * 256)) * 256


def _upright(rows: Tensor) -> Tensor:
    """`rows` with columns side by side in memory.

    The units for TF32 read operands along the sum alone. ``W.T X`` has neither that way, and the library then takes
    slow kernels, at 200 TFLOP/s on an H200 instead of 350 where it has one.
    """
    return rows.T.contiguous().T


def _add_product(left: Tensor, right: Tensor, out: Tensor, precision: Precision, *, first: bool, turned: bool) -> None:
    """``out += left right`` (``left.T right`` if turned), summed in float32."""
    x = left.T if turned else left
    if precision == "bf16" and left.is_cuda and hasattr(torch.ops.aten.addmm, "dtype_out"):
        if first:
            torch.mm(x, right, out_dtype=torch.float32, out=out)
        else:
            torch.addmm(out, x, right, out_dtype=torch.float32, out=out)
        return
    if precision == "tf32":
        with products_in(precision, left.device):
            if first:
                torch.mm(x, right, out=out)
            else:
                torch.addmm(out, x, right, out=out)
        return
    from trimtab.losses.triton import stream_kernels

    tiles = TILES["product", "ieee"]
    stream_kernels.add_product[(-(-out.shape[0] // tiles.bm), -(-out.shape[1] // tiles.bn))](
        _rows_of(left, tiles.bk, tiles.bm) if turned else _rows_of(left, tiles.bm, tiles.bk),
        _rows_of(right, tiles.bk, tiles.bn), out, *out.shape, out.stride(0), left.shape[0 if turned else 1],
        TURNED=turned, FIRST=first, PRECISION=_DOT[precision], BM=tiles.bm, BN=tiles.bn, BK=tiles.bk,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
