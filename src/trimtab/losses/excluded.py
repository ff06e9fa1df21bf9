"""From reductions over the negatives to losses: ``softplus(L - positive)``, smoothing, means over what counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trimtab.losses.problem import Kind, Problem
from trimtab.losses.reduce import log1pexp
from trimtab.losses.smoothing import candidate_count, closed_mean

Reduce = Callable[[Problem, Kind], Tensor]

__all__ = ["combine", "complete", "excluded", "masked_mean", "smoothed"]


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
