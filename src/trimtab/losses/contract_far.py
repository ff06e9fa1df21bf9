"""The contraction where logits spread: masses as logarithms, each row of the operands relative to its maximum.

Kept for the backward pass: ``e^a``, ``e^b``, ``e^c`` as operands, and the two products. ``T`` and ``U`` exist one block
at a time. With ``Y = dT / (e^a e^b)``, which needs neither a logarithm nor a division (it is ``g e^(c - L)``), the
gradient of ``a`` is ``e^a * (Y e^b')``, that of ``b`` is ``e^b * (e^a' Y)``, and so on; all of them are reduced to the
tables before the next block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.contract_blocks import Gathered, Groups, Places, lattice_views, spans, split
from trimtab.losses.entries import relative
from trimtab.losses.products import multiply, operand, products_in

__all__ = ["ContractFar"]


class ContractFar(torch.autograd.Function):
    """Log-masses of all ``p``, ``q`` and ``r``."""

    @staticmethod
    def forward(
        ctx: Any, groups: Groups, places: Places, own: Tensor, with_t: Tensor, with_u: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The two products and their log-sums, one block of rows at a time."""
        a, b, c = split(tables, groups)
        keep = any(ctx.needs_input_grad)
        with products_in(groups.precision, own.device):
            top = sum((t.amax() for t in b[1:]), start=b[0].amax())
            e_a, top_a = _exponentials(a, groups)
            e_c, top_c = _exponentials(c, groups)
            e_b, _ = _exponentials(b, groups, top)
            by_a, by_c = top_a + own + top, top_c + own + top
            rows, columns, t = _log_sums(e_a, e_b, c, by_a, groups, (places, 2, with_t), keep=keep)
            _, middle, u = _log_sums(e_c, e_b.T, a, by_c, groups, (places, 1, with_u), keep=keep)
        ctx.groups, ctx.places, ctx.count = groups, places, len(t) + len(u)
        ctx.save_for_backward(with_t, with_u, by_a, by_c, rows, middle, columns, e_a, e_b, e_c, *t, *u, *tables)
        return rows, middle, columns

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_rows: Tensor, g_middle: Tensor, g_columns: Tensor) -> tuple[Tensor | None, ...]:
        """Weights ``g e^(z - L)`` of all entries, carried to the tables by four products."""
        groups, places, count = ctx.groups, ctx.places, ctx.count
        with_t, with_u, by_a, by_c, rows, middle, columns, e_a, e_b, e_c, *more = ctx.saved_tensors
        products = iter(more[:count])
        a, _, c = split(more[count:], groups)
        d_a, d_b = Gathered(0, len(middle), groups, rows), Gathered(1, len(columns), groups, rows)
        d_c = Gathered(0, len(columns), groups, rows, with_rows=True)
        rows, middle, columns = (torch.where(x == -math.inf, math.inf, x) for x in (rows, middle, columns))
        factor, (g_rows, g_middle, g_columns) = relative((g_rows, g_middle, g_columns))
        p, q, r = places.groups
        d_t = g_rows[p] * (with_t - rows[p]).exp_() + g_columns[r] * (with_t - columns[r]).exp_()
        d_u = g_middle[q] * (with_u - middle[q]).exp_()
        with products_in(groups.precision, rows.device):
            y_u = torch.empty_like(e_a)
            for at, z in _blocks(a, groups.chunk):  # weights of U, through its columns (q)
                z += by_c[at, None]
                w = z.sub_(middle).exp_().mul_(g_middle)
                places.put(w, at, 1)
                y_u[at] = w
            y_t = torch.empty_like(e_c)
            for at, z in _blocks(c, groups.chunk):  # of T, through its rows (p) and columns (r)
                z += by_a[at, None]
                w = (z - rows[at, None]).exp_().mul_(g_rows[at, None])
                w += z.sub_(columns).exp_().mul_(g_columns)
                places.put(w, at, 2)
                y_t[at] = w
                w.mul_(next(products))
                d_c.take(at, w.add_(multiply(y_u[at], e_b).mul_(e_c[at])))
            for at in d_a.spans():
                w = next(products).mul(y_u[at])
                d_a.take(at, w.add_(multiply(y_t[at], e_b.T).mul_(e_a[at])))
            for at in d_b.spans():
                w = multiply(e_a[:, at].T, y_t)
                w += multiply(y_u[:, at].T, e_c)
                d_b.take(at, w.mul_(e_b[at]))
        grads = [d_c.by_row, d_t, d_u, *d_a.tables, *d_b.tables, *d_c.tables]
        return None, None, *(g.mul_(factor) for g in grads)


def _blocks(tables: Sequence[Tensor], chunk: int) -> Iterator[tuple[slice, Tensor]]:
    """The matrix whose entries are sums of one row of each table, by blocks of rows."""
    width = tables[0].shape[1]
    for at in spans([t.shape[0] for t in tables], width, chunk):
        first, *others = lattice_views(tables, at)
        if not others:
            yield at, first.clone()
            continue
        for view in others:
            first = first + view
        yield at, first.view(-1, width)


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
    beside: tuple[Places, int, Tensor],
    *,
    keep: bool,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-sums of rows and columns of ``matrix + by_row + log(left right)``, and the blocks of the product."""
    rows, columns = (by_row.new_full((size,), -math.inf) for size in (left.shape[0], right.shape[1]))
    places, column, values = beside
    kept = []
    for at, block in _blocks(tables, groups.chunk):
        product = multiply(left[at], right)
        if keep:
            kept.append(product)
        block += product.log() if keep else product.log_()
        block += by_row[at, None]
        places.put(block, at, column, values)
        rows[at] = torch.logsumexp(block, 1)
        columns = torch.logaddexp(columns, torch.logsumexp(block, 0))
    return rows, columns, kept
