"""The super-rows of one half of the modalities on a GPU: built in one pass, and their gradients folded back in one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from trimtab.losses.superrows import diagonal_stride, outer

__all__ = ["FORMS", "Form", "Side", "build", "fold", "form_of", "marginal_sums", "shifts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One similarity: ``factor f(|sum_m v_m|^2 - less sum_m |v_m|^2)``, f the identity or the root; or the product."""

    add: bool = True
    root: bool = False
    factor: float = 1.0
    less: float = 0.0


FORMS = ("mip", "norm", "sqnorm", "paircos", "dist2")


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
    longest: Tensor
    """0-dim: the largest length of a super-row."""
    keep: Tensor | None
    """``[count]`` uint8: which super-rows exist."""
    first: int
    factor: int

    @property
    def count(self) -> int:
        """How many super-rows there are here."""
        return self.rows.shape[0]

    @property
    def stride(self) -> int:
        """The distance between super-rows ``(i, .., i)``."""
        return diagonal_stride(self.parts.shape[1], self.parts.shape[0])


def build(
    xs: Sequence[Tensor], present: Tensor | None, form: Form, span: tuple[int, int], dtype: torch.dtype, factor: int = 1
) -> Side:
    """The super-rows ``span`` of ``xs``; those with an absent part are zero."""
    from trimtab.losses import triton_row_kernels

    parts = torch.stack([x.detach() for x in xs])
    k, batch, width = parts.shape
    first, end = span
    padded = -(-width // 64) * 64
    keep = None if present is None else outer(list(present), product=True)[first:end].to(torch.uint8)
    rows = parts.new_empty(end - first, padded, dtype=dtype)
    squares = parts.new_empty(end - first)
    triton_row_kernels.build_rows[(-(-(end - first) // 8),)](
        parts, keep, rows, squares, first, end - first, batch, width, padded, float(factor),
        K=k, ADD=form.add, MASKED=keep is not None, BLOCK_ROWS=8, BLOCK_D=256 if padded > 128 else 64,
    )  # fmt: skip
    base = squares
    if form.less:
        base = squares - form.less * outer(list(parts.square().sum(-1)), product=False)[first:end]
    return Side(parts=parts, rows=rows, base=base, longest=squares.amax().sqrt(), keep=keep, first=first, factor=factor)


def fold(side: Side, grads: Tensor, form: Form) -> Tensor:
    """``[K, B, D]``: the gradient of every part from ``grads [count, D padded]``, those of the super-rows."""
    from trimtab.losses import triton_row_kernels

    k, batch, width = side.parts.shape
    if k == 1:
        if side.count == batch:
            return grads[None, :, :width]
        out = torch.zeros_like(side.parts)
        out[0, side.first : side.first + side.count] = grads[:, :width]
        return out
    out = torch.empty_like(side.parts)
    block = 128 if width > 64 else 32
    triton_row_kernels.fold_rows[(k * batch, -(-width // block))](
        grads, side.parts, out, side.first, side.count, batch, width, grads.stride(0), batch ** (k - 1),
        K=k, ADD=form.add, BLOCK_ROWS=32, BLOCK_D=block,
    )  # fmt: skip
    return out


def shifts(values: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """``M_p = min_m L_m[p_m]`` and ``sum_m g_m[p_m] exp2(M_p - L_m[p_m])`` of every super-row p.

    With them ``sum_m g_m[p_m] exp2(z - L_m[p_m])`` is one exponential of at most 1, whatever the size of z and L. Anchors
    without tuples (``-inf``) are left out.
    """
    k, batch = values.shape
    empty = values == -torch.inf
    values, weights = values.masked_fill(empty, torch.inf), weights.masked_fill(empty, 0.0)
    lines = [values[m].reshape([batch if n == m else 1 for n in range(k)]) for m in range(k)]
    low = reduce(torch.minimum, lines)
    low = low.masked_fill(low == torch.inf, 0.0)
    total = torch.zeros_like(low)
    for m, line in enumerate(lines):
        total = total + weights[m].reshape(line.shape) * torch.exp2(low - line)
    return low.reshape(-1), total.reshape(-1)


def marginal_sums(table: Tensor, k: int) -> Tensor:
    """``[K, B]``: the sum of ``table [B^k]`` over all super-rows with a given digit."""
    batch = round(table.shape[0] ** (1 / k))
    grid = table.reshape([batch] * k)
    return torch.stack([grid.movedim(m, 0).reshape(batch, -1).sum(1) for m in range(k)])
