"""Rows on a GPU: super-rows of one half of the modalities built in one pass and folded back in one, and rows made
comparable: what takes a dozen passes over the inputs with plain operations is one of a kernel.
With two modalities of 32,768 rows those passes were a tenth of the loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Precision, RowsContext
from trimtab.losses.tuple_reduction import diagonal_stride, outer

LOG2E = math.log2(math.e)
SMALL = 2.0**-60
"""Stands for a factor of 0: what is multiplied with it is as good as nothing, and can be divided by it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One similarity: ``factor f(|sum_m v_m|^2 - less sum_m |v_m|^2)``, f the identity or the root; or the product."""

    add: bool = True
    root: bool = False
    factor: float = 1.0
    less: float = 0.0


FORMS = ("mip", "norm", "sqnorm", "paircos", "dist2")


@cache
def form_of(similarity: str, n: int) -> Form:
    """The form of a similarity of `FORMS` for N modalities (``paircos`` of unit rows)."""
    return {
        "mip": Form(add=False),
        "norm": Form(root=True),
        "sqnorm": Form(),
        "paircos": Form(factor=1 / (n * (n - 1)), less=1.0),
        "dist2": Form(factor=1 / n**2, less=float(n)),
    }[similarity]


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Super-rows ``first ..`` of K modalities."""

    parts: Tensor
    """``[K, B, D]`` float32."""
    rows: Tensor
    """``[count, D padded]``: products or sums, in the precision of the matrix products; doubled if `factor` is 2."""
    base: Tensor
    """``[count]``: what a super-row adds to the similarity by itself."""
    squares: Tensor
    """``[count]``: squared lengths of the super-rows."""
    keep: Tensor | None
    """``[count]`` uint8: which super-rows exist."""
    first: int
    factor: int

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All there is to keep for the backward pass."""
        return self.parts, self.rows, self.base, self.squares, self.keep

    @classmethod
    def of(cls, tensors: Sequence[Tensor], first: int, factor: int) -> Side:
        """The side with these `tensors`."""
        parts, rows, base, squares, keep = tensors
        return cls(parts=parts, rows=rows, base=base, squares=squares, keep=keep, first=first, factor=factor)

    @property
    def count(self) -> int:
        """How many super-rows there are here."""
        return self.rows.shape[0]

    @property
    def stride(self) -> int:
        """The distance between super-rows ``(i, .., i)``."""
        return diagonal_stride(self.parts.shape[1], self.parts.shape[0])


def build(
    xs: Sequence[Tensor],
    present: Tensor | None,
    form: Form,
    span: tuple[int, int],
    precision: Precision = "ieee",
    factor: int = 1,
) -> Side:
    """The super-rows ``span`` of ``xs``, rounded to the precision; those with an absent part are zero."""
    parts = _together([x.detach() for x in xs])
    first, end = span
    keep = None if present is None else outer(list(present), product=True)[first:end].to(torch.uint8)
    rows, base = (t[0] for t in _build([parts], keep, form, span, precision, factor))
    squares = base
    if form.less:
        base = squares - form.less * outer(list(parts.square().sum(-1)), product=False)[first:end]
    return Side(parts=parts, rows=rows, base=base, squares=squares, keep=keep, first=first, factor=factor)


def build_pair(xs: Sequence[Tensor], form: Form, precision: Precision) -> tuple[Side, Side]:
    """All super-rows of both halves of an even number of ``xs``, in one launch: what `build` gives for each of them."""
    xs, half = [x.detach() for x in xs], len(xs) // 2
    # Two modalities are large and read where they are; more of them are small, and one copy of all takes one launch.
    parts = [_together([x]) for x in xs] if half == 1 else _together(xs).view(2, half, *xs[0].shape).unbind(0)
    rows, squares = _build(parts, None, form, (0, parts[0].shape[1] ** half), precision, 1)
    left, right = (
        Side(parts=parts[i], rows=rows[i], base=squares[i], squares=squares[i], keep=None, first=0, factor=1)
        for i in range(2)
    )
    return left, right


def _build(
    sides: Sequence[Tensor], keep: Tensor | None, form: Form, span: tuple[int, int], precision: Precision, factor: int
) -> tuple[Tensor, Tensor]:
    """Super-rows ``[S, count, D padded]`` and their squared lengths, of one or two sides ``[K, B, D]``."""
    from trimtab.losses.triton import row_kernels

    (k, batch, width), parts, others = sides[0].shape, sides[0], sides[-1]
    count, padded = span[1] - span[0], -(-width // 64) * 64
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    rows, squares = parts.new_empty(len(sides), count, padded, dtype=kind), parts.new_empty(len(sides), count)
    row_kernels.build_rows[(-(-count // 8), len(sides))](
        parts, others, keep, rows, squares, span[0], count, batch, width, padded, float(factor),
        K=k, ADD=form.add, MASKED=keep is not None, TF32=precision == "tf32",
        BLOCK_ROWS=8, BLOCK_D=256 if padded > 128 else 64,
    )  # fmt: skip
    return rows, squares


def _together(xs: Sequence[Tensor]) -> Tensor:
    """``[K, B, D]``: without a copy where the modalities already lie one after the other."""
    first, size = xs[0], xs[0].numel()
    if not all(x.is_contiguous() for x in xs):
        return torch.stack(list(xs))
    here = [(x.untyped_storage().data_ptr(), x.storage_offset() - m * size) for m, x in enumerate(xs)]
    if len(set(here)) > 1:
        return torch.stack(list(xs))
    return first.as_strided((len(xs), *first.shape), (size, *first.stride()))


def bounds(form: Form, left: Side, right: Side, scale: Tensor, limit: float) -> Tensor:
    """What the kernels read on the device: the factor in base 2, whether every ``|z| <= limit``, 0, and the factor.

    A factor of 0 is there as `SMALL`: weights that have it inside can still be divided by it.
    """
    from trimtab.losses.triton import row_kernels

    factor = scale.detach()
    if not form.add:
        out = left.squares.new_empty(4)
        row_kernels.bound_settings[(1,)](
            left.squares, left.count, right.squares, right.count, factor, limit, out, BLOCK=4096, num_warps=8
        )
        return out
    factor = factor * form.factor
    lengths = left.squares.amax().sqrt() + right.squares.amax().sqrt()
    bound = lengths if form.root else lengths.square() + left.base.abs().amax() + right.base.abs().amax()
    bounded = (factor * bound).abs() <= limit  # NaN is not
    inside = factor.masked_fill(factor == 0, SMALL)
    return torch.stack([factor * LOG2E, bounded.to(factor.dtype), torch.zeros_like(factor), inside])


def fold(side: Side, grads: Tensor, form: Form) -> Tensor:
    """``[K, B, D]``: the gradient of every part from ``grads [count, D padded]``, those of the super-rows."""
    from trimtab.losses.triton import row_kernels

    k, batch, width = side.parts.shape
    if k == 1:
        if side.count == batch:
            return grads[None, :, :width]
        out = torch.zeros_like(side.parts)
        out[0, side.first : side.first + side.count] = grads[:, :width]
        return out
    out = torch.empty_like(side.parts)
    block = 128 if width > 64 else 32
    row_kernels.fold_rows[(k * batch, -(-width // block))](
        grads, side.parts, out, side.first, side.count, batch, width, grads.stride(0), batch ** (k - 1),
        K=k, ADD=form.add, BLOCK_ROWS=32, BLOCK_D=block,
    )  # fmt: skip
    return out


def anchors(sides: Sequence[Tensor], n: int) -> Tensor:
    """``[N, B]``: log-sum-exps of the anchors, from those of the left and right super-rows in base 2."""
    from trimtab.losses.triton import row_kernels

    batch = round(sides[0].shape[0] ** (1 / (n // 2)))
    out = sides[0].new_empty(n, batch)
    for rows, k, part in zip(sides, (n // 2, n - n // 2), (out[: n // 2], out[n // 2 :]), strict=True):
        others = batch ** (k - 1)
        if k == 1:  # nothing but another base
            torch.mul(rows, math.log(2), out=part[0])
            continue
        row_kernels.anchor_sums[(k * batch,)](rows, part, batch, others, K=k, BLOCK=1024 if others > 64 else 64)
    return out


def pulls(
    values: Tensor, grads: Tensor, settings: Tensor, first: int, count: int, *, scaled: bool = False, sides: int = 1
) -> Tensor:
    """``[S, 3, count]``: shifts, weights, fast weights of super-rows ``first ..``, from their anchors ``[S K, B]``.

    ``scaled``: the weights times the factor of the logits, ``settings[3]``.
    """
    from trimtab.losses.triton import row_kernels

    k, batch = values.shape
    k //= sides
    out = values.new_empty(sides, 3, count)
    row_kernels.pull_rows[(-(-count // 256), sides)](
        values, grads.contiguous(), settings, out, first, count, batch, K=k, SCALED=scaled, BLOCK=256
    )
    return out


def marginal_sums(side: Side, sums: Tensor) -> Tensor:
    """``[K, B]``: the sums of ``sums [count]`` over all super-rows with a given row of a given part."""
    k, batch = side.parts.shape[:2]
    table = sums.new_zeros(batch**k)
    table[side.first : side.first + side.count] = sums
    grid = table.reshape([batch] * k)
    return torch.stack([grid.movedim(m, 0).reshape(batch, -1).sum(1) for m in range(k)])


def add_own(side: Side, grads: Tensor, sums: Tensor) -> None:
    """What a super-row's own length adds: ``d|u|^2 = 2 u``. (The rows of a side with factor 2 are already doubled.)"""
    for start in range(0, side.count, 8192):
        part = slice(start, start + 8192)
        twice = (2 // side.factor) * sums[part].unsqueeze(-1)
        grads[part] = side.factor * grads[part] + twice * side.rows[part]


log = logging.getLogger("trimtab")

WIDEST = 1 << 14
"""Entries of a row that one program holds at most."""
APART = 1 << 20
"""Entries of a modality from which on it is read where it is; smaller ones are first put together, in one launch."""


def supports_unit_rows(xs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether `unit_rows` can do it: matrices with float32 sums on a card, outside of a compiler."""
    from trimtab.losses.triton.stream_launcher import available

    if xs[0].dim() != 2 or xs[0].shape[1] > WIDEST or dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    return available(xs[0].device) and _runs(xs[0].device)


@cache
def _runs(device: torch.device) -> bool:
    """Tried once: launching takes a C compiler, which not every machine has, and plain operations do as well."""
    try:
        unit_rows([torch.ones(1, 16, device=device, dtype=torch.float32)], "l2", None)
    except Exception as error:
        log.info("no Triton kernels for rows on %s (%s: %s)", device, type(error).__name__, error)
        return False
    return True


def unit_rows(xs: Sequence[Tensor], how: str, present: Tensor | None) -> tuple[Tensor, ...]:
    """The modalities in float32 with rows of length 1 (l2) or root mean square 1 (rms), absent and zero rows zero."""
    rows: tuple[Tensor, ...] = _Unit.apply(how, present, *xs)  # type: ignore[no-untyped-call]
    return rows


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: RowsContext, how: str, present: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
        from trimtab.losses.triton import row_kernels

        n, (batch, width) = len(xs), xs[0].shape
        lengths, tops = (torch.empty(n, batch, dtype=torch.float32, device=xs[0].device) for _ in range(2))
        keep = None if present is None else present.to(torch.uint8).contiguous()
        ctx.squared = float(width) if how == "rms" else 1.0
        if batch * width < APART:
            rows = torch.stack([x.float() for x in xs])
            calls = [(rows.view(-1, width), 0)]
        else:
            rows = torch.empty(n, batch, width, dtype=torch.float32, device=xs[0].device)
            calls = [(x if x.stride(1) == 1 else x.contiguous(), m * batch) for m, x in enumerate(xs)]
        for x, first in calls:
            grid, blocks = _launch_unit(*x.shape)
            row_kernels.unit_rows[grid](
                x, keep, rows, lengths, tops,
                len(x), x.stride(0), width, math.sqrt(ctx.squared), first, MASKED=keep is not None, **blocks,
            )  # fmt: skip
        ctx.dtypes = [x.dtype for x in xs]
        ctx.save_for_backward(rows, lengths, tops)
        return rows.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: RowsContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from trimtab.losses.triton import row_kernels

        rows, lengths, tops = ctx.saved_tensors
        n, batch, width = rows.shape
        if batch * width < APART:
            together = torch.stack(grads).view(-1, width)
            out = torch.empty_like(rows)
            calls = [(together, out, 0)]
            found = list(out.unbind(0))
        else:
            found = [torch.empty(batch, width, dtype=ctx.dtypes[m], device=rows.device) for m in range(n)]
            calls = [(g if g.stride(1) == 1 else g.contiguous(), found[m], m * batch) for m, g in enumerate(grads)]
        for g, out, first in calls:
            grid, blocks = _launch_unit(*g.shape)
            row_kernels.unit_grads[grid](
                g, rows, lengths, tops, out, len(g), g.stride(0), width, ctx.squared, first, **blocks
            )
        wanted = zip(found, ctx.dtypes, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(g.to(dtype) if need else None for g, dtype, need in wanted)


def _launch_unit(count: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the rows and entries of a program."""
    wide = max(16, 1 << (width - 1).bit_length())
    tall = max(1, min(16, 2048 // wide))
    return (-(-count // tall),), {"BLOCK_ROWS": tall, "BLOCK_D": wide, "num_warps": 4 if wide <= 4096 else 8}
