"""The contraction where all logits are near 0: no logarithm, maximum or exponential ever meets a large matrix.

With all logits within `near_limit` of 0 everything fits the range of the type as it is. The operands are products of
exponentials of small tables, the masses ``e^c * (e^a e^b)`` are summed as they come, and every gradient is a product.
That is about a third of the passes over memory that `contract_far` makes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.contract_blocks import Gathered, Groups, Places, lattice_views, spans, split
from trimtab.losses.entries import relative
from trimtab.losses.products import multiply, operand, products_in

__all__ = ["ContractNear", "near_limit"]


def near_limit(dtype: torch.dtype, groups: Groups) -> float:
    """How far from 0 a logit may be, in nats: a sum of all that one entry stands for must not leave the type.

    70 of the 87 nats of float32 (690 of 708): the rest is for cotangents smaller than the largest.
    """
    sizes = sorted(math.prod(s) for s in groups.sizes)
    return (690.0 if dtype == torch.float64 else 70.0) - math.log(sizes[1] * sizes[2])


class ContractNear(torch.autograd.Function):
    """Log-masses of all ``p``, ``q`` and ``r``."""

    @staticmethod
    def forward(
        ctx: Any, groups: Groups, places: Places, own: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The two products and their masses, one block of rows at a time."""
        a, b, c = split(tables, groups)
        keep = any(ctx.needs_input_grad)
        with products_in(groups.precision, own.device):
            e_a, e_b, e_c = _exponentials(a, groups), _exponentials(b, groups), _exponentials(c, groups, own)
            rows, middle, columns = (own.new_zeros(x) for x in (e_a.shape[0], e_a.shape[1], e_c.shape[1]))
            # The entries that contain a positive, summed without it.
            fixed_t, fixed_u = (x.sum(1) for x in _beside_positives(e_a, e_b, e_c, places, own.dtype))
            kept = []
            for at in spans(groups.sizes[0], e_c.shape[1], groups.chunk):
                product = multiply(e_a[at], e_b)
                places.put(product, at, 2, fixed_t)
                mass = product * e_c[at]
                torch.sum(mass, 1, out=rows[at])
                columns += mass.sum(0)
                kept.append(product if keep else product[:0])
            for at in spans(groups.sizes[0], e_a.shape[1], groups.chunk):
                product = multiply(e_c[at], e_b.T)
                places.put(product, at, 1, fixed_u)
                middle += (product * e_a[at]).sum(0)
                kept.append(product if keep else product[:0])
        ctx.groups, ctx.places = groups, places
        ctx.save_for_backward(rows, middle, columns, e_a, e_b, e_c, *kept)
        return rows.log(), middle.log(), columns.log()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_rows: Tensor, g_middle: Tensor, g_columns: Tensor) -> tuple[Tensor | None, ...]:
        """Weights ``g / mass`` of the anchors, carried to the tables by four products."""
        groups, places = ctx.groups, ctx.places
        rows, middle, columns, e_a, e_b, e_c, *kept = ctx.saved_tensors
        d_a, d_b = Gathered(0, len(middle), groups, rows), Gathered(1, len(columns), groups, rows)
        d_c = Gathered(0, len(columns), groups, rows, with_rows=True)
        factor, alpha, beta, gamma = _weights((g_rows, g_middle, g_columns), (rows, middle, columns))
        p, q, r = places.groups
        beside_t, beside_u = _beside_positives(e_a, e_b, e_c, places, rows.dtype)
        beside_t.mul_(((alpha[p] + gamma[r]) * e_c[p, r]).unsqueeze(1))
        beside_u.mul_((beta[q] * e_a[p, q]).unsqueeze(1))
        with products_in(groups.precision, rows.device):
            y_t, y_u = torch.empty_like(e_c), torch.empty_like(e_a)
            for at in d_c.spans():
                torch.mul(alpha[at, None] + gamma, e_c[at], out=y_t[at])
                places.put(y_t[at], at, 2)
            for at in d_a.spans():
                torch.mul(e_a[at], beta, out=y_u[at])
                places.put(y_u[at], at, 1)
            products = iter(kept)
            for at in d_c.spans():
                w, product = multiply(y_u[at], e_b), next(products)
                w.addcmul_(product, alpha[at, None]).addcmul_(product, gamma).mul_(e_c[at])
                places.add(w, at, 0, beside_u)
                d_c.take(at, w)
            for at in d_a.spans():
                w = multiply(y_t[at], e_b.T).addcmul_(next(products), beta).mul_(e_a[at])
                places.add(w, at, 0, beside_t)
                d_a.take(at, w)
            for at in d_b.spans():
                w = multiply(e_a[:, at].T, y_t)
                w += multiply(y_u[:, at].T, e_c)
                w.mul_(e_b[at])
                places.add(w, at, 1, beside_u)
                d_b.take(at, w.index_add_(1, r, beside_t[:, at].T))
        grads = [d_c.by_row, *d_a.tables, *d_b.tables, *d_c.tables]
        return None, None, *(g.mul_(factor) for g in grads)


def _beside_positives(
    e_a: Tensor, e_b: Tensor, e_c: Tensor, places: Places, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """For each positive the terms of its entry of either product, and 0 for its own."""
    p, q, r = places.groups
    of_t = e_a.index_select(0, p).to(dtype) * e_b.index_select(1, r).T
    of_u = e_c.index_select(0, p).to(dtype) * e_b.index_select(0, q)
    return of_t.scatter_(1, q.unsqueeze(1), 0.0), of_u.scatter_(1, r.unsqueeze(1), 0.0)


def _weights(cotangents: Sequence[Tensor], masses: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The largest cotangent, and all of them relative to it, over their masses."""
    factor, cotangents = relative(cotangents)
    # An anchor without a tuple has no mass, and no weight.
    return factor, *(torch.where(m == 0, 0.0, g / m) for g, m in zip(cotangents, masses, strict=True))


def _exponentials(tables: Sequence[Tensor], groups: Groups, own: Tensor | None = None) -> Tensor:
    """``e^matrix`` as an operand, a product of exponentials of its tables (and of ``own``, by row)."""
    raised = [t.exp() for t in tables]
    by_row = None if own is None else own.exp()
    if len(raised) == 1:
        return operand(raised[0] if by_row is None else raised[0].mul_(by_row[:, None]), groups.precision)
    rows, width = math.prod(t.shape[0] for t in tables), tables[0].shape[1]
    out = operand(tables[0][:0], groups.precision).new_empty(rows, width)
    for at in spans([t.shape[0] for t in tables], width, groups.chunk):
        first, *others, last = lattice_views(raised, at)
        for view in others:
            first = first * view
        if by_row is None:
            shape = [max(i, j) for i, j in zip(first.shape, last.shape, strict=True)]
            torch.mul(first, last, out=out[at].view(shape))
        else:
            out[at] = (first * last).view(-1, width).mul_(by_row[at, None])
    return out
