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

from trimtab.losses.logits import line_similarity
from trimtab.losses.machine import LINES
from trimtab.losses.problem import Kind, Problem
from trimtab.losses.reduce import candidates, empty, reduce_all
from trimtab.losses.superrows import share_of

Lines = Literal["axis", "joint"]

__all__ = ["reduce_lines"]


def reduce_lines(problem: Problem, kind: Kind, objective: Lines) -> Tensor:
    """``[N, B]``: for every anchor, the reduction over its ``B - 1`` negatives on the line."""
    batch = problem.batch
    begin, end = share_of(batch, problem.share)
    rows = max(1, (problem.chunk or LINES) // batch)
    tiles = [(a, min(a + rows, end)) for a in range(begin, end, rows)]
    result = []
    for m in range(problem.num_modalities):
        tensors = [*problem.xs, problem.scale, *([] if problem.bias is None else [problem.bias])]
        line = _line(problem, kind, objective, m)
        if len(tiles) == 1:
            part = line(tiles[0], *tensors)
        elif tiles:
            part = _Recomputed.apply(line, tiles, *tensors)  # type: ignore[no-untyped-call]
        else:
            part = problem.xs[0].new_empty(0)
        whole = torch.full((batch,), empty(kind), dtype=problem.xs[0].dtype, device=problem.xs[0].device)
        result.append(torch.cat([whole[:begin], part, whole[end:]]))
    return torch.stack(result)


def _line(problem: Problem, kind: Kind, objective: Lines, m: int) -> Callable[..., Tensor]:
    """The reduction of the anchors ``a .. b`` of modality m, as a function of the tensors alone."""

    def line(tile: tuple[int, int], *tensors: Tensor) -> Tensor:
        xs, (scale, *bias) = tensors[: problem.num_modalities], tensors[problem.num_modalities :]
        a, b = tile
        rest, single = [x for k, x in enumerate(xs) if k != m], xs[m]
        if objective == "axis":
            z = scale * line_similarity([x[a:b] for x in rest], single, problem.similarity)
        else:
            z = scale * line_similarity(rest, single[a:b], problem.similarity).T
        valid = _candidates(problem, objective, m)
        every = torch.ones_like(z, dtype=torch.bool) if valid is None else valid.expand_as(z).clone()
        every.diagonal(a).fill_(False)
        return reduce_all(candidates(z, every, kind, bias[0] if bias else None), kind, 1)

    return line


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
