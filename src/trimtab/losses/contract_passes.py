"""The two passes of the contraction: six large products, by blocks of rows, with only small tables outside.

Kept for the backward pass: ``e^a``, ``e^b``, ``e^c`` as operands, and the two products. ``T`` and ``U`` exist one block
at a time. With ``Y = dT / (e^a e^b)``, which needs neither a logarithm nor a division (it is ``g e^(c - L)``), the
gradient of ``a`` is ``e^a * (Y e^b')``, that of ``b`` is ``e^b * (e^a' Y)``, and so on; all of them are reduced to the
tables before the next block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Precision
from trimtab.losses.products import multiply, operand, products_in

__all__ = ["Groups", "contract"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Three groups of modalities and how to work on them."""

    sizes: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]
    precision: Precision
    chunk: int
    """Entries of a block of rows."""
    drop: Tensor
    """``[3, K]`` on the host: the super-rows of the positives."""


def contract(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    c: Sequence[Tensor],
    own: Tensor,
    beside: tuple[Tensor, Tensor],
    groups: Groups,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-masses of all ``p``, ``q`` and ``r``; ``beside`` are those entries of T and U that would hold a positive."""
    rows, middle, columns = _Contract.apply(groups, own, *beside, *a, *b, *c)  # type: ignore[no-untyped-call]
    return rows, middle, columns


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, groups: Groups, own: Tensor, with_t: Tensor, with_u: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        a, b, c = _split(tables, groups)
        keep = any(ctx.needs_input_grad)
        with products_in(groups.precision, own.device):
            top = sum((t.amax() for t in b[1:]), start=b[0].amax())
            e_a, top_a = _exponentials(a, groups)
            e_c, top_c = _exponentials(c, groups)
            e_b, _ = _exponentials(b, groups, top)
            by_a, by_c = top_a + own + top, top_c + own + top
            rows, columns, t = _log_sums(e_a, e_b, c, by_a, groups, (groups.drop[[0, 2]], with_t), keep=keep)
            _, middle, u = _log_sums(e_c, e_b.T, a, by_c, groups, (groups.drop[[0, 1]], with_u), keep=keep)
        ctx.groups = groups
        ctx.save_for_backward(own, with_t, with_u, by_a, by_c, rows, middle, columns, e_a, e_b, e_c, t, u, *tables)
        return rows, middle, columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_rows: Tensor, g_middle: Tensor, g_columns: Tensor) -> tuple[Tensor | None, ...]:
        groups: Groups = ctx.groups
        own, with_t, with_u, by_a, by_c, rows, middle, columns, e_a, e_b, e_c, t, u, *tables = ctx.saved_tensors
        a, b, c = _split(tables, groups)
        d_a, d_b, d_c = _Gathered(a, groups), _Gathered(b, groups), _Gathered(c, groups, with_rows=True)
        rows, middle, columns = (torch.where(x == -math.inf, math.inf, x) for x in (rows, middle, columns))
        p, q, r = groups.drop.to(own.device)
        d_t = g_rows[p] * (with_t - rows[p]).exp_() + g_columns[r] * (with_t - columns[r]).exp_()
        d_u = g_middle[q] * (with_u - middle[q]).exp_()
        with products_in(groups.precision, own.device):
            y_t, y_u = torch.empty_like(e_c), torch.empty_like(e_a)
            for at, z in _blocks(c, groups.chunk):  # weights of T, through its rows (p) and columns (r)
                z += by_a[at, None]
                w = (z - rows[at, None]).exp_().mul_(g_rows[at, None])
                w += z.sub_(columns).exp_().mul_(g_columns)
                y_t[at] = _put(w, at, groups.drop[[0, 2]])
                d_c.add(at, w.mul_(t[at]))
            for at, z in _blocks(a, groups.chunk):  # of U, through its columns (q) alone
                z += by_c[at, None]
                w = z.sub_(middle).exp_().mul_(g_middle)
                y_u[at] = _put(w, at, groups.drop[[0, 1]])
                d_a.add(at, w.mul_(u[at]))
            for at in d_a.spans():
                d_a.add(at, multiply(y_t[at], e_b.T).mul_(e_a[at]))
            for at in d_c.spans():
                d_c.add(at, multiply(y_u[at], e_b).mul_(e_c[at]))
            for at in d_b.spans():
                w = multiply(e_a[:, at].T, y_t)
                w += multiply(y_u[:, at].T, e_c)
                d_b.add(at, w.mul_(e_b[at]))
        return None, d_c.by_row, d_t, d_u, *d_a.tables, *d_b.tables, *d_c.tables


class _Gathered:
    """Owns the gradients of the tables whose sum is a matrix, and takes that of the matrix block by block."""

    def __init__(self, tables: Sequence[Tensor], groups: Groups, *, with_rows: bool = False) -> None:
        self.sizes = [t.shape[0] for t in tables]
        self.tables = [torch.zeros_like(t) for t in tables]
        self.by_row = tables[0].new_zeros(math.prod(self.sizes)) if with_rows else None
        self.chunk = groups.chunk

    def spans(self) -> Iterator[slice]:
        """Blocks of rows: whole indices of the first modality."""
        return _spans(self.sizes, self.tables[0].shape[1], self.chunk)

    def add(self, at: slice, matrix: Tensor) -> None:
        """Add the sums of a block of rows over what each table does not know."""
        inner = math.prod(self.sizes[1:])
        first = slice(at.start // inner, at.stop // inner)
        if self.by_row is not None:
            self.by_row[at] += matrix.sum(1)
        lattice = matrix.view(first.stop - first.start, *self.sizes[1:], -1)
        for m, table in enumerate(self.tables):
            others = [k for k in range(len(self.sizes)) if k != m]
            part = lattice.sum(others) if others else lattice
            if m == 0:
                table[first] += part
            else:
                table += part


def _split(tables: Sequence[Tensor], groups: Groups) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    p, q = len(groups.sizes[0]), len(groups.sizes[1])
    return tables[:p], tables[p : p + q], tables[p + q :]


def _spans(sizes: Sequence[int], width: int, chunk: int) -> Iterator[slice]:
    inner = math.prod(sizes[1:])
    step = max(1, chunk // (inner * width))
    for i in range(0, sizes[0], step):
        yield slice(i * inner, min(i + step, sizes[0]) * inner)


def _blocks(tables: Sequence[Tensor], chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """The matrix whose entries are sums of one row of each table, by blocks of rows."""
    sizes, width = [t.shape[0] for t in tables], tables[0].shape[1]
    inner = math.prod(sizes[1:])
    for at in _spans(sizes, width, chunk):
        count = (at.stop - at.start) // inner
        block = tables[0][at.start // inner : at.stop // inner]
        rest = tables[1:]
        if not rest:
            yield at, block.clone()
            continue
        shape = [1] * len(sizes)
        total: Tensor = block.view(count, *shape[1:], width)
        for m, table in enumerate(rest, start=1):
            view = table.view(*shape[:m], sizes[m], *shape[m + 1 :], width)
            total = total + view
        yield at, total.view(-1, width)


def _exponentials(tables: Sequence[Tensor], groups: Groups, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``e^(matrix - top)`` as an operand, with the maximum of each row as its top where none is given."""
    rows, width = math.prod(t.shape[0] for t in tables), tables[0].shape[1]
    tops = tables[0].new_empty(rows)
    out = operand(tables[0][:0], groups.precision).new_empty(rows, width)
    for at, block in _blocks(tables, groups.chunk):
        tops[at] = block.amax(1) if top is None else top
        out[at] = block.sub_(tops[at, None]).exp_()
    return out, tops


def _log_sums(
    left: Tensor,
    right: Tensor,
    tables: Sequence[Tensor],
    by_row: Tensor,
    groups: Groups,
    beside: tuple[Tensor, Tensor],
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sums of rows and columns of ``matrix + by_row + log(left right)``, and the product where it is kept."""
    shape = left.shape[0], right.shape[1]
    rows, columns = (by_row.new_full((size,), -math.inf) for size in shape)
    kept = by_row.new_empty(shape if keep else 0)
    for at, block in _blocks(tables, groups.chunk):
        product = multiply(left[at], right)
        if keep:
            kept[at] = product
        block += product.log_()
        block += by_row[at, None]
        _put(block, at, *beside)
        rows[at] = torch.logsumexp(block, 1)
        columns = torch.logaddexp(columns, torch.logsumexp(block, 0))
    return rows, columns, kept


def _put(block: Tensor, at: slice, places: Tensor, values: Tensor | None = None) -> Tensor:
    """The block with the entries beside positives overwritten in place, by zeros where no values are given."""
    here = ((places[0] >= at.start) & (places[0] < at.stop)).nonzero().flatten()
    if len(here):
        rows, columns = places[:, here].to(block.device)
        block[rows - at.start, columns] = block.new_zeros(()) if values is None else values[here.to(block.device)]
    return block
