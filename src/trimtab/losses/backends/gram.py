"""The tuple stream that knows no width: every logit from node and pair tables, tile by tile.

Work is ``O(B^N)`` with a few additions, a root and an exponential per tuple; memory is ``O(B^(N//2 + 1))`` for the
tables and one tile. The backward pass computes the tiles again.

Precision: ``norm`` takes ``|sum x|^2`` from inner products. Where the sum nearly vanishes these cancel, and what is
left of ``|sum x|`` is off by a few ``sqrt(eps) * max |x|`` (measured with antipodal unit rows, N=2..6, D=64: at most
5.2e-8 in float64, 9.8e-4 in float32); everywhere else the error is that of the inputs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import softplus

from trimtab.losses.backends.gram_tiles import (
    Block,
    Family,
    Formula,
    Lattice,
    Summed,
    blocks_of,
    formula_tables,
    summed_tables,
)
from trimtab.losses.problem import Context, Kind, Problem
from trimtab.losses.similarity import FORMULAS, SUMMED, pair_tables, wide
from trimtab.losses.tuple_reduction import Entries, anchors, entries_of, no_tuples, ravel, relative

SIMILARITIES = SUMMED + FORMULAS
CHUNK_HOST, CHUNK_DEVICE = 1 << 18, 1 << 24
"""Tuples per tile: what stays in a core's cache, and what keeps a card busy."""

__all__ = ["SIMILARITIES", "reduce_tuples"]


def reduce_tuples(problem: Problem, kind: Kind) -> Tensor:
    """Reduce the negatives to ``[N, B]``, from tables alone.

    Example:
        >>> xs = (torch.eye(3), torch.eye(3))
        >>> problem = Problem(xs=xs, similarity="sqnorm", scale=torch.tensor(1.0))
        >>> reduce_tuples(problem, "sum")  # two negatives each, |e_i + e_j|^2 = 2
        tensor([[4., 4., 4.],
                [4., 4., 4.]])
    """
    if problem.similarity not in SIMILARITIES:
        raise ValueError(f"similarity is {problem.similarity!r}: the gram backend has {', '.join(SIMILARITIES)}.")
    dtype = problem.xs[0].dtype
    if problem.similarity == "volume":  # the little that near vectors span is a difference of inner products
        xs, bias = tuple(wide(x) for x in problem.xs), None if problem.bias is None else wide(problem.bias)
        problem = replace(problem, xs=xs, scale=wide(problem.scale), bias=bias)
    with torch.autocast(problem.xs[0].device.type, enabled=False):
        entries = entries_of(problem)
        if 0 in entries.sizes:
            return no_tuples(problem, kind).to(dtype)
        lattice = Lattice(sizes=entries.sizes, left=(problem.num_modalities + 1) // 2)
        tables, build = _tables(problem, entries, lattice)
        chunk = problem.chunk or (CHUNK_HOST if tables[0].device.type == "cpu" else CHUNK_DEVICE)
        plan = _Plan(kind=kind, lattice=lattice, build=build, blocks=_blocks(lattice, entries, chunk))
        bias = problem.bias if kind == "softplus" and problem.bias is not None else tables[0].new_zeros(())
        rows, columns = _Reduce.apply(plan, bias.to(tables[0].dtype), *tables)  # type: ignore[no-untyped-call]
        values = anchors(rows, lattice.sizes[: lattice.left], kind) + anchors(columns, lattice.right_sizes, kind)
        return entries.place(values, problem.batch, kind).to(dtype)


Build = Callable[[Sequence[Tensor]], Family]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What does not change between the two passes."""

    kind: Kind
    lattice: Lattice
    build: Build
    """From the tables to the family that makes tiles of them."""
    blocks: list[tuple[Block, Tensor | None]]
    """Each tile with the places of its positives."""


def _tables(problem: Problem, entries: Entries, lattice: Lattice) -> tuple[list[Tensor], Build]:
    if problem.similarity in FORMULAS:
        nodes, pairs = entries.cut(*pair_tables(problem.xs, problem.similarity))
        tables = [*formula_tables(problem.similarity, nodes, pairs), problem.scale.to(nodes[0].dtype)]
        return tables, partial(Formula, lattice=lattice, name=problem.similarity)
    root = problem.similarity == "norm"
    factor = problem.scale.square() if root else problem.scale  # inside the tables it costs nothing, gradient included
    nodes, pairs = entries.cut(*pair_tables(problem.xs, problem.similarity, factor))
    return summed_tables(nodes, pairs, lattice), partial(Summed, lattice=lattice, root=root)


def _blocks(lattice: Lattice, entries: Entries, chunk: int) -> list[tuple[Block, Tensor | None]]:
    rows = ravel(entries.positives[: lattice.left], lattice.sizes[: lattice.left])
    columns = ravel(entries.positives[lattice.left :], lattice.right_sizes)
    in_rows, in_columns = rows.tolist(), columns.tolist()  # both rise, so that those of one tile follow each other
    out: list[tuple[Block, Tensor | None]] = []
    for block in blocks_of(lattice, chunk):
        begin, end, c = block.outers.start * lattice.last, block.outers.stop * lattice.last, block.columns
        low = max(bisect_left(in_rows, begin), bisect_left(in_columns, c.start))
        high = min(bisect_left(in_rows, end), bisect_left(in_columns, c.stop))
        drop = (rows[low:high] - begin) * (c.stop - c.start) + columns[low:high] - c.start if low < high else None
        out.append((block, drop))
    return out


class _ReduceContext(Context, Protocol):
    plan: _Plan
    references: list[float | None]


class _Reduce(torch.autograd.Function):
    """Row and column reductions of all tiles; in the backward pass the tiles again, weighted."""

    @staticmethod
    def forward(ctx: _ReduceContext, plan: _Plan, bias: Tensor, *tables: Tensor) -> tuple[Tensor, Tensor]:
        family = plan.build(tables)
        if plan.kind == "lse":
            rows, columns, references = _log_sums(plan, family, tables[0])
        else:
            rows, columns = _sums(plan, family, tables[0], bias)
            references = []
        ctx.plan, ctx.references = plan, references
        ctx.save_for_backward(bias, rows, columns, *tables)
        return rows.reshape(-1), columns

    @staticmethod
    @once_differentiable
    def backward(ctx: _ReduceContext, g_rows: Tensor, g_columns: Tensor) -> tuple[Tensor | None, ...]:
        bias, rows, columns, *tables = ctx.saved_tensors
        plan = ctx.plan
        family = plan.build(tables)
        factor, (g_rows, g_columns) = relative((g_rows.reshape(rows.shape), g_columns))
        d_bias = torch.zeros_like(bias)
        with torch.autocast(rows.device.type, enabled=False):
            if plan.kind == "lse":
                _pull_log_sums(plan, family, ctx.references, (rows, columns), (g_rows, g_columns))
            else:
                for block, drop in plan.blocks:
                    z, pull = family.open(block)
                    w = (g_rows[block.outers].unsqueeze(-1) + g_columns[block.columns]).expand(z.shape)
                    w = w * torch.sigmoid(z + bias) if plan.kind == "softplus" else w.contiguous()
                    _fill(w, drop, 0.0)
                    d_bias += w.sum()
                    pull(w)
        return None, d_bias * factor, *(g.mul_(factor) for g in family.gradients())


def _sums(plan: _Plan, family: Family, like: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    lattice = plan.lattice
    rows, columns = like.new_zeros(lattice.outers, lattice.last), like.new_zeros(lattice.columns)
    for block, drop in plan.blocks:
        z = family.logits(block)
        if plan.kind == "softplus":
            z = softplus(z + bias, threshold=40.0)  # beyond 40 it is the identity in float64
        _fill(z, drop, 0.0)
        rows[block.outers] += z.sum(-1)
        columns[block.columns] += z.sum((0, 1))
    return rows, columns


def _log_sums(plan: _Plan, family: Family, like: Tensor) -> tuple[Tensor, Tensor, list[float | None]]:
    """Log-sums of rows and columns.

    Both come from one exponential where a whole tile lies near one reference: on the host, where looking is free. The
    reference is kept from tile to tile so that columns add up without logarithms. Elsewhere each has its own maximum.
    """
    lattice = plan.lattice
    rows = like.new_full((lattice.outers, lattice.last), -math.inf)
    columns = like.new_full((lattice.columns,), -math.inf)
    pending = torch.zeros_like(columns)
    reach = _reach(like.dtype)
    quick = like.device.type == "cpu"
    reference: float | None = None
    references: list[float | None] = []

    def flush() -> None:
        if reference is not None:
            torch.logaddexp(columns, pending.log().add_(reference), out=columns)
            pending.zero_()

    for block, drop in plan.blocks:
        o, c = block.outers, block.columns
        row = column = None
        if quick and reference is not None:
            row, column = _exponentials(family.logits(block), reference, drop)
            if not _inside(row, reach) or not _inside(column, reach):
                row = None
        if row is None:
            z = family.logits(block)
            low, high = _extremes(z, drop) if quick else (0.0, math.inf)
            if high - low <= 2 * reach and math.isfinite(low):
                flush()
                reference = (low + high) / 2
                row, column = _exponentials(z, reference, drop)
            else:
                _fill(z, drop, -math.inf)
                rows[o] = torch.logaddexp(rows[o], torch.logsumexp(z, -1))
                columns[c] = torch.logaddexp(columns[c], torch.logsumexp(z, (0, 1)))
                references.append(None)
                continue
        assert reference is not None
        assert column is not None
        rows[o] = torch.logaddexp(rows[o], row.log_().add_(reference))
        pending[c] += column
        references.append(reference)
    flush()
    return rows, columns, references


def _pull_log_sums(
    plan: _Plan,
    family: Family,
    references: Sequence[float | None],
    values: tuple[Tensor, Tensor],
    cotangents: tuple[Tensor, Tensor],
) -> None:
    """Weights ``g_p exp(z - L_p) + g_q exp(z - L_q)``: every exponential is at most 1, for any scale and sign of g."""
    rows, columns = (torch.where(v == -math.inf, math.inf, v) for v in values)  # no tuples: no weight
    g_rows, g_columns = cotangents
    last: float | None = None
    for (block, drop), reference in zip(plan.blocks, references, strict=True):
        o, c = block.outers, block.columns
        z, pull = family.open(block)
        if reference is None:
            w = (z - rows[o].unsqueeze(-1)).exp_().mul_(g_rows[o].unsqueeze(-1))
            w += (z - columns[c]).exp_().mul_(g_columns[c])
        else:
            if reference != last:
                last = reference
                alpha = g_rows * (reference - rows).exp_()
                beta = g_columns * (reference - columns).exp_()
            w = alpha[o].unsqueeze(-1) + beta[c]
            w *= (z - reference).exp_()
        _fill(w, drop, 0.0)
        pull(w)


def _reach(dtype: torch.dtype) -> float:
    """How far from the reference a logit may be, in nats, so that neither it nor a sum leaves the range of the type."""
    return 600.0 if dtype == torch.float64 else 60.0


def _exponentials(z: Tensor, reference: float, drop: Tensor | None) -> tuple[Tensor, Tensor]:
    e = z.sub_(reference).exp_()
    _fill(e, drop, 0.0)
    return e.sum(-1), e.sum((0, 1))


def _inside(sums: Tensor, reach: float) -> bool:
    """Whether no sum is so small that lost terms could show in it, or too large; NaN is not inside."""
    low, high = (float(v) for v in torch.aminmax(sums))
    return math.exp(-reach) <= low and high <= math.exp(reach)


def _extremes(z: Tensor, drop: Tensor | None) -> tuple[float, float]:
    _fill(z, drop, math.inf)
    low = float(z.amin())
    _fill(z, drop, -math.inf)
    return low, float(z.amax())


def _fill(tile: Tensor, drop: Tensor | None, value: float) -> None:
    if drop is not None:
        tile.view(-1).index_fill_(0, drop.to(tile.device), value)
