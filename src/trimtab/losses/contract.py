"""Exact contraction of similarities that are sums over pairs: all tuples in six matrix products, no width in any.

The modalities fall into three groups with super-rows ``p``, ``q``, ``r``, and a logit into three matrices,
``z = a[p, q] + b[q, r] + c[p, r]``. Then ``T = c + log(e^a e^b)`` holds the log-mass of every ``(p, r)`` and
``U = a + log(e^c e^b')`` that of every ``(p, q)``; the anchors of all groups are log-sums of their rows and columns.
Only B entries of each contain a positive: those are left out of the products and summed term by term.

All terms of a product are positive, so that its relative error is that of its operands, as long as all are in range.
Near 0 (`contract_near`) they are as they come. Elsewhere (`contract_far`) rows of ``a`` and ``c`` have maximum 0, and
``b`` as a whole: an entry of the product is at least ``e^-range(b)``, and what fell below the smallest number of the
type is at most ``Q * tiny``. `range_certificate` bounds the range, `certified` says whether that leaves the lost terms
below rounding. For it, what depends on ``q`` or on ``r`` alone moves from ``b`` into ``a`` and ``c``, where it costs
nothing: a centred ``b`` has the smallest range.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.losses import gram
from trimtab.losses.contract_blocks import Groups
from trimtab.losses.contract_far import ContractFar
from trimtab.losses.contract_near import ContractNear, near_limit
from trimtab.losses.contract_tables import Tables, add, beside_positives, centred, groups_of, places_of, tables_of
from trimtab.losses.entries import anchors, entries_of, no_tuples
from trimtab.losses.pairs import LINEAR
from trimtab.losses.problem import Kind, Problem

SIMILARITIES = LINEAR

__all__ = ["SIMILARITIES", "NotCertified", "certified", "range_certificate", "range_limit", "reduce_tuples"]


class NotCertified(ValueError):
    """The logits spread too far for the contraction to be exact: another backend must do this one."""


def reduce_tuples(problem: Problem, kind: Kind) -> Tensor:
    """Reduce the negatives to ``[N, B]`` by contraction (kind ``lse``), or raise `NotCertified`.

    Example:
        >>> xs = (torch.eye(3),) * 3
        >>> problem = Problem(xs=xs, similarity="paircos", scale=torch.tensor(1.0))
        >>> reduce_tuples(problem, "lse").exp()[0]  # of eight negatives six agree in one pair: 6 e^(1/3) + 2
        tensor([10.3737, 10.3737, 10.3737])
    """
    _check(problem, kind)
    if problem.num_modalities == 2:  # nothing to contract: one matrix holds all tuples
        return gram.reduce_tuples(problem, kind)
    with torch.autocast(problem.xs[0].device.type, enabled=False):
        entries = entries_of(problem)
        if 0 in entries.sizes:
            return no_tuples(problem, kind)
        tables = tables_of(problem, entries)
        way: Any = ContractNear
        middle = problem.scale.detach() * (_lowest(problem) / 2 + 0.5)
        if _near(problem, tables.groups):
            tables = replace(tables, a=[tables.a[0] - middle / 2, *tables.a[1:]], own=tables.own - middle / 2)
        else:
            way, tables = ContractFar, centred(tables)
            bound, limit = _bound(problem, tables), _limit(problem.xs[0].dtype, tables.groups)
            if not bound < limit:
                raise NotCertified(
                    f"the logits of {problem.similarity!r} may spread over {bound:.3g} nats between two groups of "
                    f"modalities; the contraction is exact below {limit:.3g}. Use backend 'gram', or a smaller scale."
                )
        places = places_of(tables.groups, entries, problem.xs[0].device)
        beside = beside_positives(tables, entries, places) if way is ContractFar else ()
        flat = way.apply(tables.groups, places, tables.own, *beside, *tables.a, *tables.b, *tables.c)
        if way is ContractNear:
            flat = [x + middle for x in flat]
        values: list[Tensor] = []
        for side, sizes in zip(flat, tables.groups.sizes, strict=True):
            values += anchors(side, sizes, kind)
        return entries.place(values, problem.batch, kind)


def range_certificate(problem: Problem) -> float:
    """A bound, in nats, on how far apart two entries of the matrix between the two smaller groups can be.

    For ``paircos`` the bound for any unit rows is tried first, which asks the device for nothing but the scale.
    """
    _check(problem, "lse")
    if problem.num_modalities == 2:
        return 0.0
    bound = _of_unit_rows(problem)
    if bound < range_limit(problem):
        return bound
    whole = replace(problem, share=(0, 1))  # one answer for all who share the work
    entries = entries_of(whole)
    if 0 in entries.sizes:
        return 0.0
    with torch.no_grad():
        return min(bound, _measured(centred(tables_of(whole, entries))))


def range_limit(problem: Problem) -> float:
    """What the certificate must stay below, in nats."""
    return _limit(problem.xs[0].dtype, groups_of((problem.batch,) * problem.num_modalities, problem))


def certified(problem: Problem) -> bool:
    """Whether the contraction is exact for this problem; not for NaN or infinite inputs.

    Example:
        >>> xs = tuple(torch.nn.functional.normalize(torch.randn(8, 16), dim=1) for _ in range(6))
        >>> [certified(Problem(xs=xs, similarity="paircos", scale=torch.tensor(s))) for s in (100.0, 4000.0)]
        [True, False]
    """
    return range_certificate(problem) < range_limit(problem)


def _check(problem: Problem, kind: Kind) -> None:
    if problem.similarity not in SIMILARITIES:
        raise ValueError(f"similarity is {problem.similarity!r}: the contraction has {', '.join(SIMILARITIES)}.")
    if kind != "lse":
        raise ValueError(f"kind is {kind!r}: the contraction only has 'lse'. Use backend 'gram'.")


def _limit(dtype: torch.dtype, groups: Groups) -> float:
    """Lost terms are below ``tiny`` each, kept sums above ``e^-range``: ``K * tiny * e^range`` must be below ``eps``.

    With K the number of terms of a sum: about 60 nats in float32 (and in bfloat16, which has its exponents) and 660 in
    float64. The backward pass multiplies by at most ``e^range`` in between, far from overflow in both.
    """
    info = torch.finfo(dtype)
    terms = max(math.prod(sizes) for sizes in groups.sizes)
    return math.log(info.eps) - math.log(info.tiny) - math.log(terms)


def _bound(problem: Problem, tables: Tables) -> float:
    bound = _of_unit_rows(problem)
    if bound < _limit(problem.xs[0].dtype, tables.groups):
        return bound
    return min(bound, _measured(tables))


def _near(problem: Problem, groups: Groups) -> bool:
    """Whether no logit of unit rows can be far from the middle; other rows are not asked: that would be a longer wait.

    ``c`` and ``a`` each take half of the shift to the middle. What is left of a sum when one of them is taken out of it
    must be above what gets lost, as in `_limit`.
    """
    if problem.similarity != "paircos":
        return False
    scale, dtype = abs(float(problem.scale.detach())), problem.xs[0].dtype
    low, p, q, r = _lowest(problem), *(len(s) for s in groups.sizes)
    half, middle = (1 - low) / 2, (1 + low) / 2
    most = max(p * q + q * (q - 1) / 2, p * r + r * (r - 1) / 2 + p * (p - 1) / 2) / ((p + q + r) * (p + q + r - 1) / 2)
    taken = scale * (half + most - middle / 2)
    return scale * half < near_limit(dtype, groups) and taken < _limit(dtype, groups)


def _lowest(problem: Problem) -> float:
    """The least mean cosine of N unit rows: the square of their sum is not negative."""
    return -1 / (problem.num_modalities - 1)


def _of_unit_rows(problem: Problem) -> float:
    """Every cosine is within 1 of 0, and ``b`` has one pair for each two modalities of the smaller groups."""
    if problem.similarity != "paircos":
        return math.inf
    n = problem.num_modalities
    return 2 * abs(float(problem.scale.detach())) * ((n + 1) // 3) * (n // 3) * 2 / (n * (n - 1))


def _measured(tables: Tables) -> float:
    """The sum of the ranges of the tables that ``b`` is the sum of: one number from the device."""
    return float(add([t.detach().amax() - t.detach().amin() for t in tables.b]))
