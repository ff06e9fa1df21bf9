"""Logits as tensors: of all ``[B]^N`` tuples at once, or of the ``[B, B]`` lines along one modality.

The line objectives have N matrices ``[B, B]`` of tuples that differ from a sample in one modality: ``A_m[i, j]`` is the
logit of the tuple with modality m of sample j and all others of sample i. *axis* asks which ``j`` belongs to the others
of ``i`` (softmax along ``j``); *joint* asks which others belong to ``x_m[j]`` (along ``i``). Lines longer than a tile
are computed again in the backward pass instead of kept.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.cost import LINES, check_tuples
from trimtab.losses.problem import Context, Kind, Problem, make_problem
from trimtab.losses.similarity import SIMILARITIES, heights, of_pairs, of_total, positives, safe_sqrt, wide
from trimtab.losses.tuple_reduction import candidates, diagonal_stride, empty, marginals, outer, reduce_all, share_of


def nway_logits(
    xs: Sequence[Tensor],
    *,
    similarity: str = "mip",
    logit_scale: float | Tensor = 1.0,
    normalize: str | None = "auto",
) -> Tensor:
    """The logits of all tuples, ``[B] * N``: the reference for small problems, differentiable.

    The diagonal ``z[i, .., i]`` holds the positives. ``B^N`` numbers are allocated (or `TooCostly` is raised);
    the losses themselves rarely need them.

    Example:
        >>> import torch
        >>> from trimtab.losses import nway_logits
        >>> eye = torch.eye(3)
        >>> nway_logits([eye, eye, eye], similarity="paircos").shape
        torch.Size([3, 3, 3])
        >>> nway_logits([eye, eye], similarity="paircos", logit_scale=2.0)
        tensor([[2., 0., 0.],
                [0., 2., 0.],
                [0., 0., 2.]])
    """
    problem = make_problem(xs, similarity, logit_scale=logit_scale, normalize=normalize)
    check_tuples(problem.xs)
    with torch.autocast(problem.xs[0].device.type, enabled=False):
        i = torch.arange(problem.batch, device=problem.xs[0].device)
        # Near 0, distances and volumes lose half their digits to inner products: the positives come from the rows.
        s = tuple_similarity(problem.xs, similarity).index_put((i,) * len(xs), positives(problem.xs, similarity))
        return problem.scale * s


def tuple_similarity(xs: Sequence[Tensor], name: str) -> Tensor:
    """``s[t]`` of all tuples, ``[B] * N``, of prepared rows."""
    n, batch = len(xs), xs[0].shape[0]
    if name == "mip":
        left, right = outer(xs[: n // 2], product=True), outer(xs[n // 2 :], product=True)
        return (left @ right.T).reshape([batch] * n)
    dtype = xs[0].dtype
    if name == "volume":
        xs = [wide(x) for x in xs]
    squares = [x.square().sum(-1) for x in xs]

    def pair(m: int, k: int) -> Tensor:
        shape = [batch if axis in (m, k) else 1 for axis in range(n)]
        return (squares[m] if m == k else xs[m] @ xs[k].T).reshape(shape)

    return of_pairs(name, functools.cache(pair), n).to(dtype)


def line_similarity(rest: Sequence[Tensor], single: Tensor, name: str) -> Tensor:
    """``s`` of the tuples of row ``i`` of all of ``rest`` (N-1 modalities) with row ``j`` of ``single``: ``[I, J]``."""
    n = len(rest) + 1
    if SIMILARITIES[name].family != "gram":
        merged = functools.reduce(_operation(name), rest)
        squares = torch.stack([x.square().sum(-1) for x in rest]).sum(0) if name != "mip" else None
        return _of_merged(merged, squares, single, name, n)
    if name == "volume":
        # Samples whose modalities agree span next to nothing: their inner products would not know how little.
        volume, basis = heights(rest)
        over = single.square().sum(-1) - sum((e @ single.T).square() for e in basis)
        return -volume.unsqueeze(1) * safe_sqrt(over)

    def pair(m: int, k: int) -> Tensor:
        if m == n - 1:
            return single.square().sum(-1)
        return rest[m] @ single.T if k == n - 1 else (rest[m] * rest[k]).sum(-1, keepdim=True)

    return of_pairs(name, functools.cache(pair), n)


def all_line_similarities(xs: Sequence[Tensor], name: str) -> Tensor:
    """`line_similarity` of all others with each modality, ``[N, B, B]``, in few operations; not for the gram family."""
    n, merge = len(xs), _operation(name)
    before = list(itertools.accumulate(xs[:-1], merge))  # all up to m
    after = list(itertools.accumulate(reversed(xs[1:]), merge))[::-1]  # all from m + 1
    merged = torch.stack([after[0], *(merge(before[m - 1], after[m]) for m in range(1, n - 1)), before[-1]])
    single = torch.stack(list(xs))
    squares: Tensor | None = None
    if name != "mip":
        own = single.square().sum(-1)
        squares = (1 - torch.eye(n, dtype=own.dtype, device=own.device)) @ own
    return _of_merged(merged, squares, single, name, n)


def _operation(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return torch.mul if name == "mip" else torch.add


def _of_merged(merged: Tensor, squares: Tensor | None, single: Tensor, name: str, n: int) -> Tensor:
    """``[.., I, J]`` from the products or sums of the others, and the sum of their squared lengths."""
    product = merged @ single.mT
    if squares is None:
        return product
    last = single.square().sum(-1).unsqueeze(-2)
    q = 2 * product + (merged.square().sum(-1).unsqueeze(-1) + last)
    return of_total(name, q, squares.unsqueeze(-1) + last, n)


Lines = Literal["axis", "joint"]
Block = Callable[[int, tuple[int, int], Sequence[Tensor]], tuple[Tensor, Tensor]]


def reduce_lines(problem: Problem, kind: Kind, objective: Lines) -> Tensor:
    """``[N, B]``: for every anchor, the reduction over its ``B - 1`` negatives on the line."""

    def block(m: int, tile: tuple[int, int], xs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        rest, single = [x for k, x in enumerate(xs) if k != m], xs[m]
        if objective == "axis":
            s = line_similarity([x[slice(*tile)] for x in rest], single, problem.similarity)
        else:
            s = line_similarity(rest, single[slice(*tile)], problem.similarity).T
        there = _candidates(problem, objective, m)
        valid = torch.ones_like(s, dtype=torch.bool) if there is None else there.expand_as(s).clone()
        valid.diagonal(tile[0]).fill_(False)
        return s, valid

    if SIMILARITIES[problem.similarity].family != "gram" and problem.share == (0, 1) and fits(problem, problem.batch):
        return _at_once(problem, kind, objective)
    return reduce_anchors(problem, kind, problem.batch, block)


def _at_once(problem: Problem, kind: Kind, objective: Lines) -> Tensor:
    """The same for all modalities together: at small sizes, what counts is how few operations there are."""
    s = all_line_similarities(problem.xs, problem.similarity)
    s = s if objective == "axis" else s.mT
    s = s if problem.offset is None else s - problem.offset
    valid = ~torch.eye(problem.batch, dtype=torch.bool, device=s.device)
    if problem.present is not None:
        there = [_candidates(problem, objective, m) for m in range(problem.num_modalities)]
        valid = valid & torch.stack([t for t in there if t is not None]).unsqueeze(1)
    return reduce_all(candidates(problem.scale * s, valid, kind, problem.bias), kind, 2)


def fits(problem: Problem, length: int) -> bool:
    """Whether the candidates of all anchors of a modality, ``length`` each, make one tile."""
    return problem.batch * length <= (problem.chunk or LINES)


def reduce_anchors(problem: Problem, kind: Kind, length: int, block: Block) -> Tensor:
    """``[N, B]``: anchors ``a .. b`` of modality m have the similarities and valid entries ``block(m, (a, b), xs)``.

    ``length`` is the number of candidates of an anchor; only the anchors of the problem's share are computed.
    """
    n, batch = problem.num_modalities, problem.batch
    begin, end = share_of(batch, problem.share)
    rows = max(1, (problem.chunk or LINES) // length)
    tiles = [(a, min(a + rows, end)) for a in range(begin, end, rows)]
    tensors = [*problem.xs, problem.scale, *([] if problem.bias is None else [problem.bias])]
    outside = torch.full((batch - end + begin,), empty(kind), dtype=problem.scale.dtype, device=problem.scale.device)
    result = []
    for m in range(n):

        def line(tile: tuple[int, int], *tensors: Tensor, m: int = m) -> Tensor:
            xs, (scale, *bias) = tensors[:n], tensors[n:]
            s, valid = block(m, tile, xs)
            s = s if problem.offset is None else s - problem.offset
            return reduce_all(candidates(scale * s, valid, kind, bias[0] if bias else None), kind, 1)

        part = outside[:0]
        if len(tiles) == 1:
            part = line(tiles[0], *tensors)
        elif tiles:
            part = _Recomputed.apply(line, tiles, *tensors)  # type: ignore[no-untyped-call]
        result.append(torch.cat([outside[:begin], part, outside[begin:]]))
    return torch.stack(result)


def _candidates(problem: Problem, objective: Lines, m: int) -> Tensor | None:
    """``[B]``: which samples can stand as a candidate of anchors of modality m; None where all can."""
    if problem.present is None:
        return None
    if objective == "axis":
        return problem.present[m]
    return torch.cat([problem.present[:m], problem.present[m + 1 :]]).all(0)


class _RecomputedContext(Context, Protocol):
    line: Callable[..., Tensor]
    tiles: Sequence[tuple[int, int]]


class _Recomputed(torch.autograd.Function):
    """Tiles of anchors one after the other, forgotten after the forward pass and computed again in the backward one."""

    @staticmethod
    def forward(
        ctx: _RecomputedContext, line: Callable[..., Tensor], tiles: Sequence[tuple[int, int]], *tensors: Tensor
    ) -> Tensor:
        ctx.line, ctx.tiles = line, tiles
        ctx.save_for_backward(*tensors)
        return torch.cat([line(tile, *tensors) for tile in tiles])

    @staticmethod
    @once_differentiable
    def backward(ctx: _RecomputedContext, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        # Buffers of its own: the pieces of several inputs may be one and the same tensor.
        total = [torch.zeros_like(t) if need else None for t, need in zip(ctx.saved_tensors, needs, strict=True)]
        start = ctx.tiles[0][0]
        for tile in ctx.tiles:
            with torch.enable_grad(), torch.autocast(grad.device.type, enabled=False):
                leaves = [t.detach().requires_grad_(need) for t, need in zip(ctx.saved_tensors, needs, strict=True)]
                wanted = [t for t in leaves if t.requires_grad]
                part = torch.autograd.grad(ctx.line(tile, *leaves), wanted, grad[tile[0] - start : tile[1] - start])
            for whole, piece in zip((t for t in total if t is not None), part, strict=True):
                whole.add_(piece)
        return (None, None, *total)


def reduce_tuples(problem: Problem, kind: Kind) -> Tensor:
    """``[N, B]``: the negatives reduced as `problem.py` says; every similarity, plain autograd."""
    n, batch = problem.num_modalities, problem.batch
    k = n // 2
    s = tuple_similarity(problem.xs, problem.similarity).reshape(batch**k, -1)
    z = problem.scale * (s if problem.offset is None else s - problem.offset)
    valid = torch.ones_like(z, dtype=torch.bool)
    i = torch.arange(batch, device=z.device)
    valid[i * diagonal_stride(batch, k), i * diagonal_stride(batch, n - k)] = False
    if problem.present is not None:
        left, right = (outer(list(part), product=True) for part in (problem.present[:k], problem.present[k:]))
        valid &= left.unsqueeze(1) & right
    begin, end = share_of(batch**k, problem.share)
    valid[:begin] = False
    valid[end:] = False
    z = candidates(z, valid, kind, problem.bias)
    return marginals(reduce_all(z, kind, 1), reduce_all(z, kind, 0), n, kind)
