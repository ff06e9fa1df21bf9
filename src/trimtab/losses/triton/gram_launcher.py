"""The D-free stream on a GPU: ``norm`` and the linear similarities of 4 to 7 modalities, a few instructions per tuple.

With the pair tables of `similarity` the similarity of a tuple ``(p, q)`` is ``f(a_p + b_q + sum_m H_m[p_m, q])``, a few
additions: the width of the inputs is nowhere in the ``B^N`` loop. Sums over q and gradients of the tables are added
with atomics, whose order is not fixed: where deterministic algorithms are demanded, `supports` says no.
"""

from __future__ import annotations

from itertools import combinations
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Context, Kind, Problem
from trimtab.losses.similarity import SUMMED, pair_list, pair_tables
from trimtab.losses.triton.row_launcher import LOG2E, anchors, pulls
from trimtab.losses.tuple_reduction import diagonal_stride, outer, share_of

SAFE_NATS = 60.0
"""Where z is no further than this from the middle of its range, ``exp`` and all sums of it fit a float32."""
LANE = 16
"""Columns side by side: four lanes of four, so that a sum over columns is two shuffles."""
TILES = (2048, 1024)
"""Tuples a warp holds at a time, forward and backward: what its registers take."""
PROGRAMS = 4096
"""Programs that keep a large card busy: with fewer columns than that, several share the lead between them."""

__all__ = ["reduce_tuples", "supports"]


def supports(problem: Problem, kind: Kind) -> bool:
    """Whether `reduce_tuples` can do it: log-sum-exps of a sum of tables (or its root), float32, in any order."""
    n, batch = problem.num_modalities, problem.batch
    return (
        kind == "lse"
        and problem.similarity in SUMMED
        and 4 <= n <= 7
        and problem.xs[0].dtype == torch.float32
        and (n // 2) * batch ** (n - n // 2 + 1) < 2**31
        and not torch.are_deterministic_algorithms_enabled()
    )


def reduce_tuples(problem: Problem, kind: Kind) -> Tensor:
    """``[N, B]`` as `problem.py` says; parts are shared out by the lead, the left modalities but the last."""
    if not supports(problem, kind):
        what = f"{kind!r} of {problem.similarity!r} over {problem.num_modalities} x {list(problem.xs[0].shape)}"
        raise NotImplementedError(f"the D-free Triton kernels cannot do {what} here; use backend='gram'.")
    node, pair = pair_tables(problem.xs, problem.similarity)
    result: Tensor = _Gram.apply(problem, problem.scale, node, pair)  # type: ignore[no-untyped-call]
    return result


class _GramContext(Context, Protocol):
    problem: Problem


class _Gram(torch.autograd.Function):
    @staticmethod
    def forward(ctx: _GramContext, problem: Problem, scale: Tensor, node: Tensor, pair: Tensor) -> Tensor:
        from trimtab.losses.triton import gram_kernels

        a, b, tables = _tables(node, pair)
        settings = _settings(problem, scale, a, b, tables)
        where, compiled = _launch(problem, tables, TILES[0])
        top = [torch.full_like(side, -torch.inf) for side in (a, b)]
        total = [torch.zeros_like(side) for side in (a, b)]
        if where:
            for mode in (0, 1, 2):
                gram_kernels.gram_sums[where](
                    a,
                    b,
                    tables,
                    *_masks(problem),
                    settings,
                    *top,
                    *total,
                    *_sizes(problem, where),
                    MODE=mode,
                    **compiled,
                )
        # In the fast form the maxima were not looked for: all sums have the same middle.
        shift = [torch.where(settings[1] != 0, settings[2], t.masked_fill(t == -torch.inf, 0.0)) for t in top]
        values = anchors([t.log2_().add_(s) for t, s in zip(total, shift, strict=True)], len(node))
        ctx.problem = problem
        ctx.save_for_backward(scale, node, pair, values, a, b, tables, settings)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx: _GramContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        from trimtab.losses.triton import gram_kernels

        scale, node, pair, values, a, b, tables, settings = ctx.saved_tensors
        problem = ctx.problem
        half = problem.num_modalities // 2
        where, compiled = _launch(problem, tables, TILES[1])
        halves = (slice(half), a), (slice(half, None), b)
        pull = [pulls(values[m], grad[m], settings, 0, len(side))[0] for m, side in halves]
        grad_a, grad_tables = torch.zeros_like(a), torch.zeros_like(tables)
        if where:
            for fast in (True, False):
                (row_shift, *rows), (column_shift, *columns) = pull
                gram_kernels.gram_weights[where](
                    a, b, tables, *_masks(problem), row_shift, rows[fast], column_shift, columns[fast], settings,
                    grad_a, grad_tables,
                    *_sizes(problem, where), FAST=fast, **compiled,
                )  # fmt: skip
        grad_node, grad_pair = _untables(grad_a, grad_tables, len(node))
        # The similarity (under the root) is linear in the tables: their products with their gradients add up to it.
        moment = (node * grad_node).sum() + (pair * grad_pair).sum()
        factor = scale * (0.5 if problem.similarity == "norm" else 1.0)
        return None, moment, grad_node.mul_(factor), grad_pair.mul_(factor)


def _spread(table: Tensor, dims: tuple[int, ...], of: int) -> Tensor:
    """``table`` with its dimensions (after a leading one) at ``dims`` of ``of``, to be broadcast along the rest."""
    sizes = iter(table.shape[1:])
    return table.reshape(table.shape[0], *(next(sizes) if d in dims else 1 for d in range(of)))


def _tables(node: Tensor, pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """``a [B^l]``, ``b [B^r]`` and ``H [l, B, B^r]`` of the left and right modalities."""
    n, batch = node.shape
    half = n // 2
    pairs = dict(zip(pair_list(n), pair, strict=True))

    def inner(members: range) -> Tensor:
        k = len(members)
        terms = [_spread(node[None, m], (i,), k) for i, m in enumerate(members)]
        for i, j in combinations(range(k), 2):
            terms.append(_spread(pairs[members[i], members[j]][None], (i, j), k))
        return sum(terms[1:], terms[0]).reshape(-1)

    total = torch.zeros((), device=node.device, dtype=torch.float32)
    for j in range(half, n):
        cross = torch.stack([pairs[m, j] for m in range(half)])
        total = total + _spread(cross, (0, 1 + j - half), 1 + n - half)
    return inner(range(half)), inner(range(half, n)), total.reshape(half, batch, -1)


def _untables(grad_a: Tensor, grad_tables: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Gradients of node and pair from those of ``a`` and ``H``; that of ``b`` is in every ``H``."""
    half, batch = grad_tables.shape[:2]
    sides = grad_a.reshape([batch] * half), grad_tables[0].sum(0).reshape([batch] * (n - half))
    grids = grad_tables.reshape([half, batch] + [batch] * (n - half))

    def over(table: Tensor, *kept: int) -> Tensor:
        gone = [d for d in range(table.dim()) if d not in kept]
        return table.sum(gone) if gone else table

    cross = [over(grids, 0, 1, 2 + j) for j in range(n - half)]
    lines = []
    for i, j in pair_list(n):
        base = half if i >= half else 0
        lines.append(cross[j - half][i] if i < half <= j else over(sides[i >= half], i - base, j - base))
    nodes = [over(sides[m >= half], m - half if m >= half else m) for m in range(n)]
    return torch.stack(nodes), torch.stack(lines)


def _settings(problem: Problem, scale: Tensor, a: Tensor, b: Tensor, tables: Tensor) -> Tensor:
    """On the device: the factor in base 2, whether z is bounded, and the middle of its range."""
    bound = a.abs().amax() + b.abs().amax() + tables.abs().amax((1, 2)).sum()
    if problem.similarity == "norm":
        middle = scale.detach() * bound.sqrt() / 2
        bounded = middle.abs() <= SAFE_NATS  # from 0 to twice the middle; NaN is not
    else:
        middle = torch.zeros_like(bound)
        bounded = (scale.detach() * bound).abs() <= SAFE_NATS
    return torch.stack([scale.detach() * LOG2E, bounded.to(bound.dtype), middle * LOG2E])


def _launch(problem: Problem, tables: Tensor, tile: int) -> tuple[tuple[int, int, int] | None, dict[str, bool | int]]:
    """The grid (columns, rows, parts of the lead; None: nothing to do), and what the kernels are compiled for."""
    half, batch, columns = tables.shape
    rows = min((r for r in (64, 32, 16) if r <= max(batch, 16)), key=lambda r: (-(-batch // r) * r, -r))
    wide = tile // rows
    begin, end = share_of(batch ** (half - 1), problem.share)
    grid = -(-columns // wide), -(-batch // rows)
    parts = max(1, min(end - begin, PROGRAMS // (grid[0] * grid[1])))
    compiled = {
        "ROOT": problem.similarity == "norm", "THREE": half == 3, "MASKED": problem.present is not None,
        "EVEN": batch % rows == 0 and columns % wide == 0, "C": wide // LANE, "BP": rows, "W": LANE, "num_warps": 1,
    }  # fmt: skip
    return ((*grid, parts) if end > begin else None), compiled


def _sizes(problem: Problem, where: tuple[int, int, int]) -> tuple[int, ...]:
    """B, Q, the stride of the positives, the first lead, how many there are, and how many a program takes."""
    n, batch = problem.num_modalities, problem.batch
    begin, end = share_of(batch ** (n // 2 - 1), problem.share)
    right = n - n // 2
    return batch, batch**right, diagonal_stride(batch, right), begin, end - begin, -(-(end - begin) // where[2])


def _masks(problem: Problem) -> tuple[Tensor | None, Tensor | None]:
    """Which super-rows exist, left and right."""
    if problem.present is None:
        return None, None
    half = problem.num_modalities // 2
    left, right = (outer(list(part), product=True) for part in (problem.present[:half], problem.present[half:]))
    return left.to(torch.uint8), right.to(torch.uint8)
