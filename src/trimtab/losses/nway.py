"""`nway_loss`: one function for every objective, similarity and backend."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from trimtab.losses.backends.sampled import draw_permutations, reduce_sampled, sampled_count
from trimtab.losses.cost import BACKENDS, BUDGET_S, OBJECTIVES, Estimate, double_is_cheap
from trimtab.losses.dispatch import OFFSET, pick
from trimtab.losses.problem import Kind, Problem, check_anchors, check_name, check_smoothing, check_xs, make_problem
from trimtab.losses.similarity import SIMILARITIES, of_total, positives
from trimtab.losses.tuple_reduction import log1pexp, products_in

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from trimtab.losses.distributed import Team


REDUCTIONS = ("mean", "sum", "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class NWayOutput:
    """A loss with what it is made of; made by ``nway_loss(..., details=True)``.

    Example:
        >>> import torch
        >>> from trimtab.losses import nway_loss
        >>> eye = torch.eye(4)
        >>> out = nway_loss([eye, eye, eye], similarity="paircos", objective="axis", logit_scale=10.0, details=True)
        >>> out.backend, out.per_modality.shape, bool(out.probability.min() > 0.99)
        ('dense', torch.Size([3]), True)
    """

    loss: Tensor
    per_modality: Tensor
    """``[N]``: the mean loss of the anchors of each modality; their mean is the loss (``reduction="mean"``)."""
    backend: str
    cost: Estimate
    positives: Tensor | None = None
    """``[B]``: the logits of the samples themselves (not for ``pairwise``)."""
    negatives: Tensor | None = None
    """``[N, B]``: the log-sum-exp of the negatives of every anchor (softmax objectives but ``pairwise``)."""
    probability: Tensor | None = None
    """``[N]``: the mean probability that the softmax gives the positive, where there are ``negatives``; no gradient."""
    permutations: Tensor | None = None
    """``[R, N, N, B]``: the index sets that ``sampled`` drew."""


class LossSettings(TypedDict, total=False):
    """The arguments of `nway_loss` that stay the same from batch to batch."""

    anchors: str | Sequence[int]
    normalize: str | None
    precision: str
    backend: str
    label_smoothing: float
    reduction: str
    num_samples: int
    chunk: int | None
    budget_s: float
    budget_bytes: float | None


class _Arguments(LossSettings, total=False):
    similarity: str
    objective: str
    logit_scale: float | Tensor
    logit_bias: float | Tensor | None
    mask: Tensor | None
    generator: torch.Generator | None
    group: ProcessGroup | None


@overload
def nway_loss(xs: Sequence[Tensor], *, details: Literal[True], **settings: Unpack[_Arguments]) -> NWayOutput: ...
@overload
def nway_loss(xs: Sequence[Tensor], *, details: Literal[False] = ..., **settings: Unpack[_Arguments]) -> Tensor: ...
@overload
def nway_loss(xs: Sequence[Tensor], *, details: bool = ..., **settings: Unpack[_Arguments]) -> Tensor | NWayOutput: ...
def nway_loss(
    xs: Sequence[Tensor],
    *,
    similarity: str = "mip",
    objective: str = "axis",
    logit_scale: float | Tensor = 1.0,
    logit_bias: float | Tensor | None = None,
    anchors: str | Sequence[int] = "all",
    normalize: str | None = "auto",
    precision: str = "auto",
    backend: str = "auto",
    label_smoothing: float = 0.0,
    mask: Tensor | None = None,
    reduction: str = "mean",
    num_samples: int = 1,
    generator: torch.Generator | None = None,
    chunk: int | None = None,
    budget_s: float = BUDGET_S,
    budget_bytes: float | None = None,
    group: ProcessGroup | None = None,
    details: bool = False,
) -> Tensor | NWayOutput:
    """The contrastive loss of N modalities: ``xs[m][i]`` is what modality m says about sample i.

    Args:
        xs: N tensors ``[B, D]`` of one shape and device; N >= 2.
        similarity: of a tuple of rows: ``mip``, ``norm``, ``sqnorm``, ``paircos``, ``dist2``, ``dist``, ``cosmean``,
            ``volume`` (see `similarity.py`).
        objective: which tuples an anchor ``(m, i)`` is compared with: ``axis`` (modality m of all samples beside the
            others of i), ``joint`` (the others of all samples beside ``x_m[i]``), ``full`` (all ``B^(N-1)``),
            ``pairwise`` (the sum of all two-modality losses), ``sampled`` (``num_samples`` random sets),
            ``sigmoid`` (all tuples, each a binary question).
        logit_scale: a positive number, or a tensor of one element, which may want gradients and is never waited for.
        logit_bias: of ``sigmoid`` only, added to every logit.
        anchors: ``"all"``, or the modalities whose anchors count. For ``pairwise``: pairs with one of these.
        normalize: rows of length 1 (``l2``), of root mean square 1 (``rms``; ``mip`` is then the mean over the width),
            as they are (``None``), or ``auto``: rms for ``mip``, l2 for the rest.
        precision: of sums and products: ``fp64``; ``fp32``; ``tf32`` and ``bf16``, for the large products on CUDA
            alone; or ``auto``: as the inputs are, and float64 for float32 problems so small that it costs nothing.
        backend: ``auto``, or one of ``dense``, ``materialize``, ``stream``, ``gram``, ``contract``, ``triton``.
        label_smoothing: eps in [0, 1): adds eps times (positive - mean over all candidates).
        mask: ``[N, B]`` bool, True = present. A tuple with an absent entry does not exist, and anchors count only where
            the whole sample is there.
        reduction: ``mean`` over the counted anchors, ``sum``, or ``none``: ``[N, B]``.
        num_samples: index sets of ``sampled``.
        generator: for them.
        chunk: tuples per tile. Any value gives the same loss.
        budget_s: seconds that the estimate may reach before the loss is refused.
        budget_bytes: the same for memory; None: nine tenths of what is free.
        group: processes that divide the work of one loss over all their batches (`distributed.py`).
        details: return an `NWayOutput`.

    Raises:
        TooCostly: the estimate is over the budget; nothing has been allocated.

    Example:
        >>> import torch
        >>> from trimtab.losses import nway_loss
        >>> image, text, sound = (torch.randn(8, 32, requires_grad=True) for _ in range(3))
        >>> loss = nway_loss([image, text, sound], similarity="norm", objective="full", logit_scale=10.0)
        >>> loss.backward()
        >>> loss.shape, image.grad.shape
        (torch.Size([]), torch.Size([8, 32]))
    """
    check_name("objective", objective, OBJECTIVES)
    check_name("reduction", reduction, REDUCTIONS)
    check_name("backend", backend, BACKENDS)
    check_smoothing(label_smoothing, objective)
    if logit_bias is not None and objective != "sigmoid":
        raise ValueError(f"logit_bias is given with objective {objective!r}; a softmax does not see it: leave it out.")
    if not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples is {num_samples!r}; expected a positive integer.")
    team: Team | None = None
    if group is not None:
        from trimtab.losses.distributed import gather_batch

        settings = similarity, objective, anchors, normalize, precision, backend, label_smoothing, reduction
        gathered = gather_batch(
            xs,
            mask,
            group,
            settings=(*settings, num_samples, chunk),
            factors=(logit_scale, logit_bias),
            draw=objective == "sampled",
            generator=generator,
        )
        xs, mask, team = gathered.xs, gathered.mask, gathered.team
        generator = torch.Generator(xs[0].device).manual_seed(gathered.seed)
    xs = check_xs(xs)
    double = precision == "auto" and all(x.dtype == torch.float32 for x in xs)
    problem = make_problem(
        xs,
        similarity,
        logit_scale=logit_scale,
        logit_bias=logit_bias,
        normalize=normalize,
        precision=precision,
        mask=mask,
        chunk=chunk,
        double=double and double_is_cheap(xs, similarity, objective),
    )
    n, batch, device = problem.num_modalities, problem.batch, problem.xs[0].device
    chosen = check_anchors(anchors, n)
    cost, reduce = pick(
        problem,
        objective,
        backend,
        budget_s=budget_s,
        budget_bytes=budget_bytes,
        num_samples=num_samples,
        team=team,
    )
    shift = cost.backend in OFFSET
    positive: Tensor | None = None
    negatives: Tensor | None = None
    permutations: Tensor | None = None
    with products_in(problem.precision, device):
        if objective == "pairwise":
            values, per_modality = pairwise_values(
                problem, chosen, lambda pair: _softmax(pair, "full", reduce, label_smoothing, shift=shift)[0]
            )
            chosen = list(range(n))
        else:
            if objective == "sampled":
                permutations = draw_permutations(n, batch, num_samples, generator, device)
                reduce = _sampled(permutations, team)
            if objective == "sigmoid":
                positive = problem.scale * positives(problem.xs, similarity)
                values = sigmoid_values(problem, reduce(problem, "softplus"), positive)
            else:
                values, positive, negatives = _softmax(
                    problem, objective, reduce, label_smoothing, shift=shift, permutations=permutations
                )
            counted = complete(problem.present)
            per_modality = masked_mean(values, counted)
            if counted is not None:
                values = values.masked_fill(~counted, 0.0)
        dtype = functools.reduce(torch.promote_types, (x.dtype for x in xs), torch.float32)
        loss = combine(values, per_modality, chosen, reduction).to(dtype)
    if not details:
        return loss
    probability: Tensor | None = None
    if positive is not None and negatives is not None:
        probability = masked_mean(torch.sigmoid(positive - negatives).detach(), complete(problem.present))
    return NWayOutput(
        loss=loss,
        per_modality=per_modality.to(dtype),
        backend=cost.backend,
        cost=cost,
        positives=None if positive is None else positive.to(dtype),
        negatives=None if negatives is None else negatives.to(dtype),
        probability=None if probability is None else probability.to(dtype),
        permutations=permutations,
    )


def _softmax(
    problem: Problem,
    objective: str,
    reduce: Reduce,
    smoothing: float,
    *,
    shift: bool,
    permutations: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Values ``[N, B]``, positives ``[B]`` and reduced negatives ``[N, B]`` of a softmax objective."""
    offset: Tensor | None = None
    if shift:
        positive = positives(problem.xs, problem.similarity)
        offset = positive.detach().mean()
        problem, positive = replace(problem, offset=offset), positive - offset
        negatives = reduce(problem, "lse")
    else:
        # The long kernels first: a card that has work does not wait while the host prepares the short ones.
        negatives = reduce(problem, "lse")
        positive = positives(problem.xs, problem.similarity)
    positive = problem.scale * positive
    values = excluded(negatives, positive)
    if smoothing > 0:
        count = None if permutations is None else sampled_count(problem, permutations)
        values = values + smoothing * smoothed(problem, objective, reduce, positive, count)
    if offset is None:
        return values, positive, negatives
    back = problem.scale * offset
    return values, positive + back, negatives + back


def _sampled(permutations: Tensor, team: Team | None) -> Reduce:
    reduce: Reduce = functools.partial(reduce_sampled, permutations=permutations)
    if team is None:
        return reduce
    from trimtab.losses.distributed import shared

    return shared(reduce, team)


Reduce = Callable[[Problem, Kind], Tensor]


def excluded(negatives: Tensor, positive: Tensor) -> Tensor:
    """``-log softmax`` of the positive, ``[N, B]``, from the log-sum-exp of the others: never negative or rounded off.

    ``logsumexp(all) - positive`` loses every digit once the loss falls under the rounding of the logits; here the loss
    and its gradient keep theirs down to 1e-38.
    """
    return log1pexp(negatives - positive)


def smoothed(problem: Problem, objective: str, reduce: Reduce, positive: Tensor, count: Tensor | None) -> Tensor:
    """``positive - mean`` over all candidates, the positive among them: what label smoothing adds per unit of eps.

    ``count`` is the number of candidates where the problem does not give it.
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
    """``[N, B]``: the mean of ``z[t]`` over all tuples with ``t_m = i``, in O(N B D); None where it takes the tuples.

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
