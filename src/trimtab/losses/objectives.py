"""From reductions over the negatives to losses: softmax, smoothing, sigmoid, pairs of modalities, and their means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from trimtab.losses.problem import Kind, Problem
from trimtab.losses.similarity import SIMILARITIES, of_total
from trimtab.losses.tuple_reduction import log1pexp

Reduce = Callable[[Problem, Kind], Tensor]


def excluded(negatives: Tensor, positive: Tensor) -> Tensor:
    """``-log softmax`` of the positive, ``[N, B]``, from the log-sum-exp of the others: never negative or rounded off.

    ``logsumexp(all) - positive`` loses every digit once the loss falls under the rounding of the logits; here the loss
    and its gradient keep theirs down to 1e-38.
    """
    return log1pexp(negatives - positive)


def smoothed(problem: Problem, objective: str, reduce: Reduce, positive: Tensor, count: Tensor | None) -> Tensor:
    """``positive - mean`` over all candidates, the positive among them: what label smoothing adds per unit of eps.

    ``count`` is the number of candidates where the problem does not tell it.
    """
    mean = closed_mean(problem) if objective == "full" else None
    if mean is None:
        among = candidate_count(problem, objective) if count is None else count
        mean = (reduce(problem, "sum") + positive) / among
    return positive - mean


def complete(present: Tensor | None) -> Tensor | None:
    """``[B]``: the samples whose every modality is there; None where all are."""
    return None if present is None else present.all(0)


def masked_mean(values: Tensor, counted: Tensor | None) -> Tensor:
    """Mean over the last axis of what is counted; a zero with a graph where nothing is."""
    if counted is None:
        return values.mean(-1)
    return values.masked_fill(~counted, 0.0).sum(-1) / counted.sum(-1).clamp_min(1)


def combine(values: Tensor, per_modality: Tensor, chosen: Sequence[int], reduction: str) -> Tensor:
    """What the caller asked for: the mean over the chosen anchor modalities, their sum, or all values."""
    # One by one: an index that is a list goes to the device first, and the host waits for all that is queued there.
    if reduction == "mean":
        some = len(chosen) < len(per_modality)
        return torch.stack([per_modality[m] for m in chosen]).mean() if some else per_modality.mean()
    if len(chosen) < values.shape[0]:
        keep = torch.zeros(values.shape[0], 1, dtype=values.dtype, device=values.device)
        for m in chosen:
            keep[m] = 1.0
        values = values * keep
    return values.sum() if reduction == "sum" else values


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


def pairwise_values(
    problem: Problem, anchors: Sequence[int], values_of: Callable[[Problem], Tensor]
) -> tuple[Tensor, Tensor]:
    """Values ``[N, B]`` and means ``[N]`` over all pairs with a modality of ``anchors``; ``values_of`` gives a pair's.

    Row m adds up what modality m is anchor of, times N / 2: so that the mean over rows is the sum over pairs, in each
    of which both directions count one half.
    """
    n = problem.num_modalities
    zero = torch.zeros_like(problem.xs[0][:, 0])
    values, means = [zero] * n, [zero.sum()] * n
    for pair in combinations(range(n), 2):
        if not set(pair) & set(anchors):
            continue
        present = None if problem.present is None else problem.present[list(pair)]
        part = values_of(replace(problem, xs=tuple(problem.xs[m] for m in pair), present=present))
        counted = complete(present)
        mean = masked_mean(part, counted)
        if counted is not None:
            part = part.masked_fill(~counted, 0.0)
        for side, m in enumerate(pair):
            values[m] = values[m] + part[side] * (n / 2)
            means[m] = means[m] + mean[side] * (n / 2)
    return torch.stack(values), torch.stack(means)


def sigmoid_values(problem: Problem, negatives: Tensor, positive: Tensor) -> Tensor:
    """``[N, B]``: the terms of all tuples of anchor ``(m, i)``, whose mean is the sum over all tuples divided by B."""
    z = positive if problem.bias is None else positive + problem.bias
    return negatives + log1pexp(-z)
