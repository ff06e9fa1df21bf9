"""`nway_loss`: one function for every objective, similarity and backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor

from trimtab.losses import dense
from trimtab.losses.excluded import combine, complete, excluded, masked_mean
from trimtab.losses.prepare import check_name, make_problem
from trimtab.losses.problem import Kind, Problem
from trimtab.losses.similarity import positives

OBJECTIVES = ("axis", "joint", "full", "pairwise", "sampled", "sigmoid")
Reduce = Callable[[Problem, Kind], Tensor]

__all__ = ["OBJECTIVES", "NWayOutput", "nway_loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NWayOutput:
    """A loss with what it is made of."""

    loss: Tensor
    per_modality: Tensor
    """``[N]``: the mean loss of the anchors of each modality."""
    backend: str


def nway_loss(
    xs: Sequence[Tensor],
    *,
    similarity: str = "mip",
    objective: str = "axis",
    logit_scale: float | Tensor = 1.0,
    logit_bias: float | Tensor | None = None,
    normalize: str | None = "auto",
    precision: str = "auto",
    backend: str = "auto",
    mask: Tensor | None = None,
    reduction: str = "mean",
    chunk: int | None = None,
    details: bool = False,
) -> Any:
    """The contrastive loss of N modalities ``[B, D]``."""
    check_name("objective", objective, OBJECTIVES)
    check_name("reduction", reduction, ("mean", "sum", "none"))
    problem = make_problem(
        xs,
        similarity,
        logit_scale=logit_scale,
        logit_bias=logit_bias,
        normalize=normalize,
        precision=precision,
        mask=mask,
        chunk=chunk,
    )
    with torch.autocast(problem.xs[0].device.type, enabled=False):
        reduce: Reduce
        if objective in ("axis", "joint"):
            name, reduce = "dense", partial(dense.reduce_lines, objective=cast(dense.Lines, objective))
        else:
            name = "materialize" if backend == "auto" else backend
            reduce = import_module(f"trimtab.losses.{name}").reduce_tuples
        positive = problem.scale * positives(problem.xs, similarity)
        values = excluded(reduce(problem, "lse"), positive)
        counted = complete(problem.present)
        per_modality = masked_mean(values, counted)
        loss = combine(values, per_modality, range(len(xs)), reduction)
    return NWayOutput(loss=loss, per_modality=per_modality, backend=name) if details else loss
