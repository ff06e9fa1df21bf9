"""The line objectives: N matrices ``[B, B]`` of tuples that differ from a sample in one modality.

``A_m[i, j]`` is the logit of the tuple with modality m of sample j and all others of sample i. *axis* asks which ``j``
belongs to the others of ``i`` (softmax along ``j``); *joint* asks which others belong to ``x_m[j]`` (along ``i``).
Lines longer than a tile are computed again in the backward pass instead of kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.cost import LINES
from trimtab.losses.logits import all_line_similarities, line_similarity
from trimtab.losses.problem import Kind, Problem
from trimtab.losses.similarity import SIMILARITIES
from trimtab.losses.tuple_reduction import candidates, empty, reduce_all, share_of

Lines = Literal["axis", "joint"]
Block = Callable[[int, tuple[int, int], Sequence[Tensor]], tuple[Tensor, Tensor]]

__all__ = ["reduce_anchors", "reduce_lines"]


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


class _Recomputed(torch.autograd.Function):
    """Tiles of anchors one after the other, forgotten after the forward pass and computed again in the backward one."""

    @staticmethod
    def forward(ctx: Any, line: Callable[..., Tensor], tiles: Sequence[tuple[int, int]], *tensors: Tensor) -> Tensor:
        ctx.line, ctx.tiles = line, tiles
        ctx.save_for_backward(*tensors)
        return torch.cat([line(tile, *tensors) for tile in tiles])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
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
