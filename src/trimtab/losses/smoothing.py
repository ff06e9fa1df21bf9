"""The mean logit over all candidates of an anchor, which label smoothing pulls to: closed forms where there are."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.losses.problem import Problem
from trimtab.losses.similarity import SIMILARITIES, of_total

__all__ = ["candidate_count", "closed_mean"]


def candidate_count(problem: Problem, objective: str) -> Tensor | float:
    """How many tuples anchor ``(m, i)`` has, its positive among them: a number, or ``[N, 1]`` under a mask."""
    n, batch = problem.num_modalities, problem.batch
    if problem.present is None:
        return float(batch) ** (n - 1 if objective == "full" else 1)
    if objective == "axis":
        count = problem.present.sum(1)
    else:
        others = [torch.cat([problem.present[:m], problem.present[m + 1 :]]) for m in range(n)]
        if objective == "joint":
            count = torch.stack([rest.all(0).sum() for rest in others])
        else:
            count = torch.stack([rest.sum(1).double().prod() for rest in others])
    return count.clamp_min(1).to(problem.xs[0].dtype).unsqueeze(1)


def closed_mean(problem: Problem) -> Tensor | None:
    """``[N, B]``: the mean of ``z[t]`` over all tuples with ``t_m = i``, in O(N B D); None where only the tuples tell.

    Absent rows are zero and leave the sums alone; the counts leave them out of the means.
    """
    spec = SIMILARITIES[problem.similarity]
    if not (spec.linear or spec.family == "product"):
        return None
    xs, n, present = problem.xs, problem.num_modalities, problem.present
    counts = [problem.batch if present is None else present[m].sum().clamp_min(1) for m in range(n)]
    means = [x.sum(0) / count for x, count in zip(xs, counts, strict=True)]
    squares = [x.square().sum(-1) for x in xs]
    mean_square = [s.sum() / count for s, count in zip(squares, counts, strict=True)]
    rows = []
    for m in range(n):
        others = [k for k in range(n) if k != m]
        if spec.family == "product":
            rows.append(xs[m] @ torch.stack([means[k] for k in others]).prod(0))
            continue
        rest = torch.stack([means[k] for k in others])
        total = rest.sum(0)
        square = squares[m] + sum(mean_square[k] for k in others)
        # 2 * sum of <mean_n, mean_k> over the pairs of others = |sum of means|^2 - sum of |mean|^2
        q = square + 2 * (xs[m] @ total) + total.square().sum() - rest.square().sum()
        rows.append(of_total(problem.similarity, q, square, n))
    mean = torch.stack(rows)
    return problem.scale * (mean if problem.offset is None else mean - problem.offset)
