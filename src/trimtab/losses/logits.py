"""Similarities and logits as tensors: of all ``[B]^N`` tuples, or of the ``[B, B]`` lines along one modality."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trimtab.losses.cost import check_tuples
from trimtab.losses.prepare import make_problem
from trimtab.losses.similarity import SIMILARITIES, heights, of_pairs, of_total, positives, safe_sqrt, wide
from trimtab.losses.tuple_reduction import outer

__all__ = ["all_line_similarities", "line_similarity", "nway_logits", "tuple_similarity"]


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
