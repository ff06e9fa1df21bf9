"""The two ways of contracting, as autograd functions over blocks of rows: for logits that spread, and for small ones.

**Far**: masses as logarithms, each row of the operands relative to its maximum.
Kept for the backward pass: ``e^a``, ``e^b``, ``e^c`` as operands, and the two products. ``T`` and ``U`` exist one block
at a time. With ``Y = dT / (e^a e^b)``, which needs neither a logarithm nor a division (it is ``g e^(c - L)``), the
gradient of ``a`` is ``e^a * (Y e^b')``, that of ``b`` is ``e^b * (e^a' Y)``, and so on; all of them are reduced to the
tables before the next block.

**Near**: no logarithm, maximum or exponential ever meets a large matrix.
With all logits within `near_limit` of 0 everything fits the range of the type as it is. The operands are products of
exponentials of small tables, the masses ``e^c * (e^a e^b)`` are summed as they come, and every gradient is a product.
That is about a third of the passes over memory that `ContractFar` makes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Context, Precision
from trimtab.losses.tuple_reduction import multiply, operand, products_in, relative


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the positives are: super-rows of the three groups, in order, here and on the device."""

    host: tuple[list[int], list[int], list[int]]
    groups: tuple[Tensor, Tensor, Tensor]

    def put(self, block: Tensor, at: slice, column: int, values: Tensor | None = None) -> None:
        """Overwrite their entries in a block of rows, with zeros where no values are given."""
        rows, here = self._rows(0, at)
        if here.start < here.stop:
            new = block.new_zeros(()) if values is None else values[here].to(block.dtype)
            block[rows, self.groups[column][here]] = new

    def add(self, block: Tensor, at: slice, group: int, values: Tensor) -> None:
        """Add one row of values to the row of each, in a block of rows of a group."""
        rows, here = self._rows(group, at)
        if here.start < here.stop:
            block.index_add_(0, rows, values[here])

    def _rows(self, group: int, at: slice) -> tuple[Tensor, slice]:
        here = slice(bisect_left(self.host[group], at.start), bisect_left(self.host[group], at.stop))
        rows = self.groups[group][here]
        return (rows - at.start if at.start else rows), here


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Three groups of modalities and how to work on them."""

    sizes: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]
    precision: Precision
    chunk: int
    """Entries of a block of rows."""


class Gathered:
    """Owns the gradients of the tables whose sum is a matrix, and takes that of the matrix block by block."""

    def __init__(self, group: int, width: int, groups: Groups, like: Tensor, *, with_rows: bool = False) -> None:
        self.sizes = groups.sizes[group]
        self.tables = [like.new_zeros(size, width) for size in self.sizes]
        self.by_row = like.new_empty(math.prod(self.sizes) if with_rows else 0)
        self.with_rows, self.chunk = with_rows, groups.chunk

    def spans(self) -> Iterator[slice]:
        """Blocks of rows: whole indices of the first modality."""
        return spans(self.sizes, self.tables[0].shape[1], self.chunk)

    def take(self, at: slice, matrix: Tensor) -> None:
        """The sums of a block of rows over what each table does not know; every block once."""
        inner = math.prod(self.sizes[1:])
        first = slice(at.start // inner, at.stop // inner)
        if self.with_rows:
            torch.sum(matrix, 1, out=self.by_row[at])
        lattice = matrix.view(first.stop - first.start, *self.sizes[1:], -1)
        for m, table in enumerate(self.tables):
            others = [k for k in range(len(self.sizes)) if k != m]
            if not others:
                table[first] = lattice
            elif m == 0:
                torch.sum(lattice, others, out=table[first])
            else:
                table += lattice.sum(others)


def split(tables: Sequence[Tensor], groups: Groups) -> tuple[Sequence[Tensor], ...]:
    """The tables of ``a``, ``b`` and ``c`` from one list."""
    p, q = len(groups.sizes[0]), len(groups.sizes[1])
    return tables[:p], tables[p : p + q], tables[p + q :]


def spans(sizes: Sequence[int], width: int, chunk: int) -> Iterator[slice]:
    """Blocks of about ``chunk`` entries: rows of whole indices of the first modality."""
    inner = math.prod(sizes[1:])
    step = max(1, chunk // (inner * width))
    for i in range(0, sizes[0], step):
        yield slice(i * inner, min(i + step, sizes[0]) * inner)


def lattice_views(tables: Sequence[Tensor], at: slice) -> list[Tensor]:
    """The tables as seen by a block of rows: one axis per modality, and the columns."""
    sizes, width = [t.shape[0] for t in tables], tables[0].shape[1]
    inner = math.prod(sizes[1:])
    first = tables[0][at.start // inner : at.stop // inner]
    ones = [1] * len(sizes)
    views = [first.reshape(first.shape[0], *ones[1:], width)]
    for m, table in enumerate(tables[1:], start=1):
        views.append(table.reshape(*ones[:m], sizes[m], *ones[m + 1 :], width))
    return views


class _ContractContext(Context, Protocol):
    groups: Groups
    places: Places
    count: int
    """How many of the saved tensors are products that the forward pass kept."""


class ContractFar(torch.autograd.Function):
    """Log-masses of all ``p``, ``q`` and ``r``."""

    @staticmethod
    def forward(
        ctx: _ContractContext,
        groups: Groups,
        places: Places,
        own: Tensor,
        with_t: Tensor,
        with_u: Tensor,
        *tables: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The two products and their log-sums, one block of rows at a time."""
        a, b, c = split(tables, groups)
        keep = any(ctx.needs_input_grad)
        with products_in(groups.precision, own.device):
            top = sum((t.amax() for t in b[1:]), start=b[0].amax())
            e_a, top_a = _far_exponentials(a, groups)
            e_c, top_c = _far_exponentials(c, groups)
            e_b, _ = _far_exponentials(b, groups, top)
            by_a, by_c = top_a + own + top, top_c + own + top
            rows, columns, t = _log_sums(e_a, e_b, c, by_a, groups, (places, 2, with_t), keep=keep)
            _, middle, u = _log_sums(e_c, e_b.T, a, by_c, groups, (places, 1, with_u), keep=keep)
        ctx.groups, ctx.places, ctx.count = groups, places, len(t) + len(u)
        ctx.save_for_backward(with_t, with_u, by_a, by_c, rows, middle, columns, e_a, e_b, e_c, *t, *u, *tables)
        return rows, middle, columns

    @staticmethod
    @once_differentiable
    def backward(
        ctx: _ContractContext, g_rows: Tensor, g_middle: Tensor, g_columns: Tensor
    ) -> tuple[Tensor | None, ...]:
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


def _far_exponentials(tables: Sequence[Tensor], groups: Groups, top: Tensor | None = None) -> tuple[Tensor, Tensor]:
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
        ctx: _ContractContext, groups: Groups, places: Places, own: Tensor, *tables: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The two products and their masses, one block of rows at a time."""
        a, b, c = split(tables, groups)
        keep = any(ctx.needs_input_grad)
        with products_in(groups.precision, own.device):
            e_a, e_b, e_c = (
                _near_exponentials(a, groups),
                _near_exponentials(b, groups),
                _near_exponentials(c, groups, own),
            )
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
    def backward(
        ctx: _ContractContext, g_rows: Tensor, g_middle: Tensor, g_columns: Tensor
    ) -> tuple[Tensor | None, ...]:
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


def _near_exponentials(tables: Sequence[Tensor], groups: Groups, own: Tensor | None = None) -> Tensor:
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
