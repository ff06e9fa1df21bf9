"""All pairs of modalities as two-modality problems: the sum of their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from trimtab.losses.excluded import complete, masked_mean
from trimtab.losses.problem import Problem

__all__ = ["pairwise_values"]


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
