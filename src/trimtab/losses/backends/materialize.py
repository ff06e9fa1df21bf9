"""All ``B^N`` logits at once: the fastest way for small problems, and the plainest."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.losses.logits import tuple_similarity
from trimtab.losses.problem import Kind, Problem
from trimtab.losses.tuple_reduction import candidates, diagonal_stride, marginals, outer, reduce_all, share_of

__all__ = ["reduce_tuples"]


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
