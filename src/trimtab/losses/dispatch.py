"""One name per way to reduce the tuples; which way a problem goes, and its refusal, before anything is allocated."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from trimtab.losses.backends.dense import reduce_lines
from trimtab.losses.cost import BACKENDS, CostSettings, Estimate, TooCostly, afford, can, choose, nway_cost
from trimtab.losses.problem import Kind, Problem

if TYPE_CHECKING:
    from trimtab.losses.distributed import Reduce, Team

log = logging.getLogger("trimtab")

OFFSET = ("dense", "materialize", "stream")
"""Backends that know `Problem.offset`."""

MODULES = {
    "materialize": "trimtab.losses.backends.dense",
    "triton_gram": "trimtab.losses.triton.gram_launcher",
    "triton_stream": "trimtab.losses.triton.stream_launcher",
}
"""Where a backend is whose module has another name; ``triton`` stands for the last two."""


class Backend(Protocol):
    """A module that reduces tuples."""

    def reduce_tuples(self, problem: Problem, kind: Kind) -> Tensor:
        """``[N, B]``: the negatives reduced as `problem.py` says."""


def pick(
    problem: Problem,
    objective: str,
    backend: str,
    *,
    budget_s: float,
    budget_bytes: float | None,
    num_samples: int = 1,
    team: Team | None = None,
) -> tuple[Estimate, Reduce]:
    """The estimate (with the backend's name) and the reduction of a problem; raises where it cannot or must not be."""
    n, batch, width = problem.num_modalities, problem.batch, problem.width
    name, device = backend, problem.xs[0].device
    if not can(backend, problem.similarity, objective, n):
        able = [b for b in BACKENDS if can(b, problem.similarity, objective, n)]
        raise ValueError(
            f"backend {backend!r} cannot do similarity {problem.similarity!r} with objective {objective!r} and {n} "
            f"modalities; those that can: {', '.join(map(repr, able))}."
        )
    if backend == "auto":
        name = choose(n, batch, problem.similarity, objective, device)
    if name == "contract":
        from trimtab.losses.backends.contract import certified

        if not certified(problem):
            # What is asked for is the loss, and the scale is learned: a run must not end because it grew.
            name = choose(n, batch, problem.similarity, objective, device, linear=False)
            _log_once(problem.similarity, name)
    if name == "triton":
        one = problem if objective != "pairwise" else replace(problem, xs=problem.xs[:2], present=None)
        module = _triton(one, "lse")
        if backend == "auto" and not module.startswith("triton"):
            name = module
        elif not module.startswith("triton") or not _kernels_run(device):
            raise ValueError(
                f"backend 'triton' needs a CUDA device of compute capability 8 or more, Triton, and sums in float32 "
                f"(here: {device}, {problem.scale.dtype}, similarity {problem.similarity!r}, {n} modalities); use "
                f"backend='auto', or precision='fp32'."
            )
    same: CostSettings = {
        "backend": name,
        "precision": {"ieee": "fp32"}.get(problem.precision, problem.precision),
        "chunk": problem.chunk,
        "num_samples": num_samples,
        "world": 1 if team is None else team.world,
    }
    cost = nway_cost(n, batch, width, similarity=problem.similarity, objective=objective, device=device, **same)
    if backend == "auto" and name == choose(n, batch, problem.similarity, objective, device):
        same["backend"] = "auto"  # of a smaller problem it may be another one; where it had to give way, it may not
    refusal: TooCostly | None = None
    try:
        afford(cost, (n, batch, width), problem.similarity, objective, device, budget_s, budget_bytes, same)
    except TooCostly as error:
        refusal = error
    if team is not None:
        from trimtab.losses.distributed import same_choice, shared

        name = same_choice(name, BACKENDS, team, refusal)
        return replace(cost, backend=name), shared(partial(reduce_with, name, objective), team)
    if refusal is not None:
        raise refusal
    return cost, partial(reduce_with, name, objective)


def reduce_with(name: str, objective: str, problem: Problem, kind: Kind) -> Tensor:
    """``[N, B]``: the negatives reduced by the backend ``name``, or by the one that stands in for a kind it lacks."""
    if name == "dense":
        return reduce_lines(problem, kind, "axis" if objective == "axis" else "joint")
    if name == "triton":
        name = _triton(problem, kind)
    if name == "contract" and kind != "lse":
        name = "gram"
    values = module_of(name).reduce_tuples(problem, kind)
    # Of two modalities, the line along one is all tuples of the other.
    return values.flip(0) if objective == "axis" else values


def module_of(name: str) -> Backend:
    """The module behind a backend's name, or behind one of the two that ``triton`` stands for."""
    return cast(Backend, import_module(MODULES.get(name, f"trimtab.losses.backends.{name}")))


def _triton(problem: Problem, kind: Kind) -> str:
    """The module behind the name, without the width where it can; the kernels have float32 log-sum-exps only."""
    from trimtab.losses.triton import gram_launcher, stream_launcher

    if gram_launcher.supports(problem, kind):
        return "triton_gram"
    if stream_launcher.supports(problem, kind):
        return "triton_stream"
    return "stream" if problem.similarity == "mip" or problem.num_modalities == 2 else "gram"


def _kernels_run(device: torch.device) -> bool:
    """On a card, or anywhere in Triton's interpreter."""
    from trimtab.losses.triton.stream_launcher import available

    return os.environ.get("TRITON_INTERPRET") == "1" or available(device)


@cache
def _log_once(similarity: str, name: str) -> None:
    log.info("the logits of %r spread too far for the exact contraction; %r takes its place", similarity, name)
