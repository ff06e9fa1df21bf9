"""Exact contraction of similarities that are sums over pairs: all tuples in six matrix products, no width in any.

The modalities fall into three groups with super-rows ``p``, ``q``, ``r``, and a logit into three matrices,
``z = a[p, q] + b[q, r] + c[p, r]``. Then ``T = c + log(e^a e^b)`` holds the log-mass of every ``(p, r)`` and
``U = a + log(e^c e^b')`` that of every ``(p, q)``; the anchors of all groups are log-sums of their rows and columns.
Only B entries of each contain a positive: those are left out of the products and summed term by term.

All terms of a product are positive, so that its relative error is that of its operands, as long as all are in range.
Near 0 (`ContractNear`) they are as they come. Elsewhere (`ContractFar`) rows of ``a`` and ``c`` have maximum 0, and
``b`` as a whole: an entry of the product is at least ``e^-range(b)``, and what fell below the smallest number of the
type is at most ``Q * tiny``. `range_certificate` bounds the range, `certified` says whether that leaves the lost terms
below rounding. For it, what depends on ``q`` or on ``r`` alone moves from ``b`` into ``a`` and ``c``, where it costs
nothing: a centred ``b`` has the smallest range.

The three matrices are sums of small tables, made in plain autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from trimtab.losses.backends import gram
from trimtab.losses.backends.contract_functions import ContractFar, ContractNear, Groups, Places, near_limit
from trimtab.losses.problem import Kind, Problem
from trimtab.losses.similarity import LINEAR, pair_tables
from trimtab.losses.tuple_reduction import Entries, Term, anchors, entries_of, lse, no_tuples, outer_sum, ravel

Pairs = dict[tuple[int, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """The three matrices as sums of smaller tables, one per modality of the group that indexes their rows."""

    groups: Groups
    a: list[Tensor]
    b: list[Tensor]
    c: list[Tensor]
    own: Tensor
    """What depends on ``p`` alone; the rest of that kind is within ``a`` (of q) and ``c`` (of r)."""


def groups_of(sizes: Sequence[int], problem: Problem) -> Groups:
    """Near equal, the largest first: the last two meet in ``b``, which should have few pairs."""
    n = len(sizes)
    cuts = [0, (n + 2) // 3, (n + 2) // 3 + (n + 1) // 3, n]
    device = problem.xs[0].device
    return Groups(
        sizes=tuple(tuple(sizes[i:j]) for i, j in pairwise(cuts)),
        cuts=tuple(cuts),
        precision=problem.precision if device.type == "cuda" else "ieee",
        chunk=problem.chunk or (1 << 27 if device.type == "cuda" else 1 << 20),
    )


def tables_of(problem: Problem, entries: Entries) -> Tables:
    """Sort all nodes and pairs into ``a``, ``b``, ``c`` and ``own``."""
    nodes, pairs = entries.cut(*pair_tables(problem.xs, problem.similarity, problem.scale))
    groups = groups_of(entries.sizes, problem)
    rows, middle, columns = (range(i, j) for i, j in pairwise(groups.cuts))
    a = _across(rows, middle, pairs, entries.sizes)
    b = _across(middle, columns, pairs, entries.sizes)
    c = _across(rows, columns, pairs, entries.sizes)
    if problem.similarity == "paircos":
        nodes = []  # nothing but zeros
    for tables, group in ((a, middle), (c, columns)):
        if nodes or len(group) > 1:
            tables[0] = tables[0] + _within(group, nodes, pairs, entries.sizes)
    own = _within(rows, nodes, pairs, entries.sizes) if nodes or len(rows) > 1 else c[0].new_zeros(len(c[0]))
    return Tables(groups=groups, a=a, b=b, c=c, own=own)


def centred(tables: Tables) -> Tables:
    """The same logits, with what depends on ``q`` or ``r`` alone moved out of ``b``; gradients stay where they were."""
    low = [t.detach() for t in tables.b]
    of_q = [(t.amin(1, keepdim=True) + t.amax(1, keepdim=True)) / 2 for t in low]
    low = [t - f for t, f in zip(low, of_q, strict=True)]
    of_r = [(t.amin(0, keepdim=True) + t.amax(0, keepdim=True)) / 2 for t in low]
    b = [t - f - h for t, f, h in zip(tables.b, of_q, of_r, strict=True)]
    first = tables.a[0] + outer_sum([((i,), f) for i, f in enumerate(of_q)], tables.groups.sizes[1])
    return replace(tables, a=[first, *tables.a[1:]], b=b, c=[tables.c[0] + add(of_r), *tables.c[1:]])


def places_of(groups: Groups, entries: Entries, device: torch.device) -> Places:
    """The super-rows of the positives in the three groups."""
    cut = [entries.positives[i:j] for i, j in pairwise(groups.cuts)]
    flat = torch.stack([ravel(at, sizes) for at, sizes in zip(cut, groups.sizes, strict=True)])
    p, q, r = flat.to(device)
    host = flat.tolist()
    return Places(host=(host[0], host[1], host[2]), groups=(p, q, r))


def _across(left: range, right: range, pairs: Pairs, sizes: Sequence[int]) -> list[Tensor]:
    tables = []
    for m in left:
        terms: list[Term] = [((0, i + 1), pairs[m, n]) for i, n in enumerate(right)]
        tables.append(outer_sum(terms, (sizes[m], *(sizes[n] for n in right))).reshape(sizes[m], -1))
    return tables


def _within(group: range, nodes: Sequence[Tensor], pairs: Pairs, sizes: Sequence[int]) -> Tensor:
    terms: list[Term] = [((i,), nodes[m]) for i, m in enumerate(group) if nodes]
    terms += [((m - group[0], n - group[0]), pairs[m, n]) for m in group for n in group if m < n]
    return outer_sum(terms, [sizes[m] for m in group])


def beside_positives(tables: Tables, entries: Entries, places: Places) -> tuple[Tensor, Tensor]:
    """The B entries of T and of U that contain a positive, without it: O(B Q) terms, in plain autograd."""
    groups = tables.groups
    _, q, r = (x.unsqueeze(1) for x in places.groups)
    rows, middle, _ = (entries.positives[i:j] for i, j in pairwise(groups.cuts))
    ravelled = torch.tensor(places.host[2], dtype=torch.long, device="cpu")
    a = add([_rows(t, i) for t, i in zip(tables.a, rows, strict=True)])
    c = add([_rows(t, i) for t, i in zip(tables.c, rows, strict=True)]) + tables.own[places.groups[0]].unsqueeze(1)
    b_rows = add([_rows(t, i) for t, i in zip(tables.b, middle, strict=True)])
    columns: list[Term] = [((0, i + 1), _rows(t.T, ravelled)) for i, t in enumerate(tables.b)]
    b_columns = outer_sum(columns, (len(r), *groups.sizes[1])).reshape(len(r), math.prod(groups.sizes[1]))
    with_t = lse((a + b_columns).scatter(1, q, -math.inf), 1) + c.gather(1, r).squeeze(1)
    with_u = lse((c + b_rows).scatter(1, r, -math.inf), 1) + a.gather(1, q).squeeze(1)
    return with_t, with_u


def _rows(table: Tensor, places: Tensor) -> Tensor:
    """Rows of a table: a part of it where they follow each other, for the sake of its gradient."""
    count = len(places)
    if count and int(places[-1]) - int(places[0]) == count - 1:
        return table[int(places[0]) : int(places[-1]) + 1]
    return table.index_select(0, places.to(table.device))


def add(terms: Sequence[Tensor]) -> Tensor:
    """Their sum."""
    return sum(terms[1:], start=terms[0])


SIMILARITIES = LINEAR


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
        near, middle = _near(problem, tables.groups), problem.scale.detach() * (_lowest(problem) / 2 + 0.5)
        contract: Callable[..., Sequence[Tensor]] = ContractNear.apply if near else ContractFar.apply
        if near:
            tables = replace(tables, a=[tables.a[0] - middle / 2, *tables.a[1:]], own=tables.own - middle / 2)
        else:
            tables = centred(tables)
            bound, limit = _bound(problem, tables), _limit(problem.xs[0].dtype, tables.groups)
            if not bound < limit:
                raise NotCertified(
                    f"the logits of {problem.similarity!r} may spread over {bound:.3g} nats between two groups of "
                    f"modalities; the contraction is exact below {limit:.3g}. Use backend 'gram', or a smaller scale."
                )
        places = places_of(tables.groups, entries, problem.xs[0].device)
        beside = beside_positives(tables, entries, places) if not near else ()
        flat = contract(tables.groups, places, tables.own, *beside, *tables.a, *tables.b, *tables.c)
        if near:
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
