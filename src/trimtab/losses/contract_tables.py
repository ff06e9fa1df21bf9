"""The three matrices of the contraction as sums of small tables, in plain autograd."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from trimtab.losses.contract_blocks import Groups, Places
from trimtab.losses.entries import Entries, Term, outer_sum, ravel
from trimtab.losses.pairs import pair_tables
from trimtab.losses.problem import Problem
from trimtab.losses.reduce import lse

Pairs = dict[tuple[int, int], Tensor]

__all__ = ["Tables", "add", "beside_positives", "centred", "groups_of", "places_of", "tables_of"]


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
