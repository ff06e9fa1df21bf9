"""Tiles of the super-row product: any number of tuples in the memory of one tile, all anchors in one pass.

``z[p, q] = scale * f(a_p + b_q + <X_p, Y_q>)`` with ``f`` the identity or the root: the product family (``X`` products
of rows) and the additive one (``X`` sums of rows). The forward pass keeps one reduction per super-row, the backward
pass computes every tile again: ``8 B^N D`` FLOPs in all, and the logits of the tuples are never stored.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.cost import tile_of
from trimtab.losses.problem import Context, Kind, Precision, Problem
from trimtab.losses.similarity import SIMILARITIES, of_total
from trimtab.losses.tuple_reduction import (
    diagonal_stride,
    empty,
    lse,
    marginals,
    multiply,
    operand,
    outer,
    products_in,
    share_of,
)

__all__ = ["reduce_tuples"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What the tiles are and what is done in them."""

    kind: Kind
    precision: Precision
    root: bool
    offset: Tensor | None
    tile: tuple[int, int]
    rows: list[int]
    """Where the positives are: increasing row numbers, with the columns of the same place in ``columns``."""
    columns: list[int]


def reduce_tuples(problem: Problem, kind: Kind) -> Tensor:
    """``[N, B]``: the negatives reduced as `problem.py` says; ``mip``, ``norm``, ``sqnorm``, ``paircos``, ``dist2``."""
    n, batch, k = problem.num_modalities, problem.batch, problem.num_modalities // 2
    if SIMILARITIES[problem.similarity].family == "gram":
        raise ValueError(f"the stream has no form for {problem.similarity!r}; use backend 'gram' or 'materialize'.")
    left, a = _side(problem, problem.xs[:k], factor=True)
    right, b = _side(problem, problem.xs[k:], factor=False)
    kept_left, kept_right, rows, columns = _kept(problem)
    begin, end = share_of(left.shape[0] if kept_left is None else kept_left.shape[0], problem.share)
    if kept_left is None:
        kept_left = torch.arange(left.shape[0], device=left.device)
    elif kept_right is not None:
        left, right = left[kept_left], right[kept_right]
        a, b = (None if a is None else a[kept_left]), (None if b is None else b[kept_right])
    inside = [j for j, row in enumerate(rows) if begin <= row < end]
    chunk = problem.chunk or tile_of(left.device)
    width = max(1, min(right.shape[0], max(math.isqrt(chunk), chunk // max(1, end - begin))))
    plan = _Plan(
        kind=kind,
        precision=problem.precision,
        root=problem.similarity == "norm",
        offset=problem.offset,
        tile=(max(1, chunk // width), width),
        rows=[rows[j] - begin for j in inside],
        columns=[columns[j] for j in inside],
    )
    bias = problem.bias if kind == "softplus" else None
    part = (left[begin:end], None if a is None else a[begin:end], right, b, problem.scale, bias)
    by_row, by_column = _TwoSided.apply(*part, plan)  # type: ignore[no-untyped-call]
    whole = [torch.full((batch**e,), empty(kind), dtype=left.dtype, device=left.device) for e in (k, n - k)]
    by_row = whole[0].index_copy(0, kept_left[begin:end], by_row)
    if kept_right is not None:
        by_column = whole[1].index_copy(0, kept_right, by_column)
    return marginals(by_row, by_column, n, kind)


def _side(problem: Problem, xs: tuple[Tensor, ...], *, factor: bool) -> tuple[Tensor, Tensor | None]:
    """The super-rows of one side and their own term; ``factor``: with what the product of two sums is multiplied by."""
    if problem.similarity == "mip":
        return outer(xs, product=True), None
    n = problem.num_modalities
    name = "sqnorm" if problem.similarity == "norm" else problem.similarity
    total = outer(xs, product=False)
    squares = outer([x.square().sum(-1) for x in xs], product=False)
    own = of_total(name, total.square().sum(-1), squares, n)
    twice = {"sqnorm": 2.0, "paircos": 2.0 / (n * (n - 1)), "dist2": 2.0 / n**2}[name]
    return (total * twice if factor else total), own


def _kept(problem: Problem) -> tuple[Tensor | None, Tensor | None, list[int], list[int]]:
    """Which super-rows exist on either side (None: all), and where the positives stand among them."""
    n, batch, k = problem.num_modalities, problem.batch, problem.num_modalities // 2
    strides = diagonal_stride(batch, k), diagonal_stride(batch, n - k)
    if problem.present is None:
        return None, None, *([i * stride for i in range(batch)] for stride in strides)  # type: ignore[return-value]
    samples = problem.present.all(0).nonzero().squeeze(1)
    kept, places = [], []
    for part, stride in zip((problem.present[:k], problem.present[k:]), strides, strict=True):
        there = outer(list(part), product=True)
        kept.append(there.nonzero().squeeze(1))
        places.append((there.cumsum(0)[samples * stride] - 1).tolist())
    return kept[0], kept[1], places[0], places[1]


class _TwoSidedContext(Context, Protocol):
    plan: _Plan


class _TwoSided(torch.autograd.Function):
    """One reduction per row and per column of the matrix of all tuples, tile by tile."""

    @staticmethod
    def forward(
        ctx: _TwoSidedContext,
        left: Tensor,
        a: Tensor | None,
        right: Tensor,
        b: Tensor | None,
        scale: Tensor,
        bias: Tensor | None,
        plan: _Plan,
    ) -> tuple[Tensor, Tensor]:
        by_row = left.new_full((left.shape[0],), empty(plan.kind))
        by_column = right.new_full((right.shape[0],), empty(plan.kind))
        with products_in(plan.precision, left.device):
            for rows, columns, s, positive in _tiles(plan, left, a, right, b):
                z = _shifted(plan, s).mul_(scale)
                if plan.kind == "softplus":
                    z = torch.logaddexp(z if bias is None else z.add_(bias), torch.zeros_like(scale))
                if positive is not None:
                    z[positive] = empty(plan.kind)
                for whole, place, dim in ((by_row, rows, 1), (by_column, columns, 0)):
                    if plan.kind == "lse":
                        torch.logaddexp(whole[place], lse(z, dim), out=whole[place])
                    else:
                        whole[place] += z.sum(dim)
        ctx.plan = plan
        ctx.save_for_backward(left, a, right, b, scale, bias, by_row, by_column)
        return by_row, by_column

    @staticmethod
    @once_differentiable
    def backward(ctx: _TwoSidedContext, grad_row: Tensor, grad_column: Tensor) -> tuple[Tensor | None, ...]:
        left, a, right, b, scale, bias, by_row, by_column = ctx.saved_tensors
        plan = ctx.plan
        by_row, by_column = (t.masked_fill(t == -torch.inf, 0.0) for t in (by_row, by_column))
        d_left, d_right, d_scale = (torch.zeros_like(t) for t in (left, right, scale))
        d_a, d_b, d_bias = (None if t is None else torch.zeros_like(t) for t in (a, b, bias))
        narrow_left, narrow_right = operand(left, plan.precision), operand(right, plan.precision)
        with products_in(plan.precision, left.device):
            for rows, columns, s, positive in _tiles(plan, left, a, right, b):
                shifted = _shifted(plan, s.clone() if plan.root else s)
                z = shifted * scale
                if positive is not None:
                    z[positive] = -torch.inf
                g_row, g_column = grad_row[rows].unsqueeze(1), grad_column[columns]
                if plan.kind == "lse":  # every exponent is at most 0
                    weight = (z - by_row[rows].unsqueeze(1)).exp_().mul_(g_row)
                    weight += z.sub_(by_column[columns]).exp_().mul_(g_column)
                elif plan.kind == "softplus":
                    weight = torch.sigmoid_(z if bias is None else z.add_(bias)).mul_(g_row + g_column)
                else:
                    weight = (g_row + g_column).masked_fill_(z == -torch.inf, 0.0)
                d_scale += (weight * shifted).sum()
                if d_bias is not None:
                    d_bias += weight.sum()
                weight.mul_(scale)
                if plan.root:
                    zero = s == 0
                    weight.div_(s.mul_(2.0).masked_fill_(zero, 1.0)).masked_fill_(zero, 0.0)
                narrow = operand(weight, plan.precision)
                d_left[rows] += multiply(narrow, narrow_right[columns])
                d_right[columns] += multiply(narrow.T, narrow_left[rows])
                if d_a is not None and d_b is not None:
                    d_a[rows] += weight.sum(1)
                    d_b[columns] += weight.sum(0)
        return d_left, d_a, d_right, d_b, d_scale, d_bias, None


def _tiles(
    plan: _Plan, left: Tensor, a: Tensor | None, right: Tensor, b: Tensor | None
) -> Iterator[tuple[slice, slice, Tensor, tuple[Tensor, Tensor] | None]]:
    """Row and column range of each tile, its similarities, and where in it the positives are."""
    left, right = operand(left, plan.precision), operand(right, plan.precision)
    for r in range(0, left.shape[0], plan.tile[0]):
        rows = slice(r, min(r + plan.tile[0], left.shape[0]))
        for c in range(0, right.shape[0], plan.tile[1]):
            columns = slice(c, min(c + plan.tile[1], right.shape[0]))
            s = multiply(left[rows], right[columns].T)
            if a is not None and b is not None:
                s.add_(a[rows].unsqueeze(1)).add_(b[columns])
            if plan.root:
                s.masked_fill_(s <= 0, 0.0).sqrt_()
            yield rows, columns, s, _positives(plan, rows, columns, left.device)


def _shifted(plan: _Plan, s: Tensor) -> Tensor:
    """``s`` less the offset, in its place."""
    return s if plan.offset is None else s.sub_(plan.offset)


def _positives(plan: _Plan, rows: slice, columns: slice, device: torch.device) -> tuple[Tensor, Tensor] | None:
    # Both lists increase, so that the positives of a tile are neighbours: no search, and no question to the device.
    begin = max(bisect_left(plan.rows, rows.start), bisect_left(plan.columns, columns.start))
    end = min(bisect_left(plan.rows, rows.stop), bisect_left(plan.columns, columns.stop))
    if begin >= end:
        return None
    place = torch.tensor([plan.rows[begin:end], plan.columns[begin:end]], device=device)
    return place[0] - rows.start, place[1] - columns.start
