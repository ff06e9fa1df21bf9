"""Which samples take part in a reduction, and the way back from super-rows to anchors.

A mask and a share both leave out samples of single modalities: the tables are cut to those that remain, so that no loop
over tuples ever meets an absent entry. A share is a contiguous part of the samples of modality 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.losses.pairs import pair_list
from trimtab.losses.problem import Kind, Problem
from trimtab.losses.reduce import empty, reduce_all
from trimtab.losses.superrows import share_of

Term = tuple[tuple[int, ...], Tensor]
"""The axes a table has, and the table."""

__all__ = ["Entries", "Term", "anchors", "entries_of", "no_tuples", "outer_sum", "ravel", "relative"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """The samples of every modality that take part, and where among them the positives are."""

    index: tuple[Tensor | None, ...]
    """Per modality the samples that take part; None: all of them."""
    sizes: tuple[int, ...]
    """How many they are."""
    positives: Tensor
    """``[N, K]`` on the host: the place of each positive that takes part among the entries of each modality."""

    def cut(self, node: Tensor, pair: Tensor) -> tuple[list[Tensor], dict[tuple[int, int], Tensor]]:
        """The tables of the entries that take part: one vector per modality, one matrix per pair."""
        nodes = [_take(row, 0, at) for row, at in zip(node, self.index, strict=True)]
        pairs = {}
        for (m, n), table in zip(pair_list(len(nodes)), pair, strict=True):
            pairs[m, n] = _take(_take(table, 0, self.index[m]), 1, self.index[n])
        return nodes, pairs

    def place(self, values: Sequence[Tensor], batch: int, kind: Kind) -> Tensor:
        """One vector per modality as ``[N, B]``; samples that take no part get ``-inf`` (lse) or 0."""
        rows = []
        for value, at in zip(values, self.index, strict=True):
            rows.append(value if at is None else value.new_full((batch,), empty(kind)).index_copy(0, at, value))
        return torch.stack(rows)


def entries_of(problem: Problem) -> Entries:
    """Read mask and share. Without a mask nothing waits for the device."""
    n, b = problem.num_modalities, problem.batch
    if problem.present is None:
        low, high = share_of(b, problem.share)
        first = None if high - low == b else torch.arange(low, high, device=problem.xs[0].device)
        whole = torch.arange(low, high, device="cpu")  # whatever the default device is
        places = torch.stack([whole - low] + [whole] * (n - 1))
        return Entries(index=(first,) + (None,) * (n - 1), sizes=(high - low,) + (b,) * (n - 1), positives=places)
    present = problem.present.cpu()
    low, high = share_of(int(present[0].sum()), problem.share)
    kept = present.clone()
    order = present[0].nonzero().flatten()
    kept[0] = False
    kept[0, order[low:high]] = True
    index = [row.nonzero().flatten() for row in kept]
    places = (kept.cumsum(1) - 1)[:, kept.all(0)]
    return Entries(
        index=tuple(at.to(problem.xs[0].device) for at in index),
        sizes=tuple(len(at) for at in index),
        positives=places,
    )


def no_tuples(problem: Problem, kind: Kind) -> Tensor:
    """The reduction where a modality has no entry left, in a graph that gives zero gradients."""
    nothing = sum(((x * 0).sum() for x in problem.xs), start=problem.scale * 0)
    return torch.full_like(problem.xs[0][:, 0], empty(kind)).expand(problem.num_modalities, -1) + nothing


def anchors(rows: Tensor, sizes: Sequence[int], kind: Kind) -> list[Tensor]:
    """From one number per super-row to one per sample of each of its modalities."""
    if len(sizes) == 1:
        return [rows]
    lattice = rows.reshape(tuple(sizes))
    lines = [lattice.movedim(m, 0).reshape(size, -1) for m, size in enumerate(sizes)]
    if len(set(sizes)) == 1:  # one reduction for all of them
        return list(reduce_all(torch.stack(lines), kind, 2))
    return [reduce_all(line, kind, 1) for line in lines]


def relative(cotangents: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The largest cotangent and all relative to it: those of a small loss would vanish beside small masses."""
    largest = torch.stack([g.abs().amax() for g in cotangents]).amax()
    largest = torch.where(largest == 0, 1.0, largest)
    return largest, [g / largest for g in cotangents]


def ravel(places: Tensor, sizes: Sequence[int]) -> Tensor:
    """The super-row of each column of places, last modality fastest."""
    strides = torch.tensor([math.prod(sizes[m + 1 :]) for m in range(len(sizes))], device=places.device)
    return strides @ places


def outer_sum(terms: Sequence[Term], sizes: Sequence[int]) -> Tensor:
    """The sum of small tables over a lattice, flattened: each term names the axes it has.

    Example:
        >>> outer_sum([((0,), torch.tensor([10, 20])), ((1,), torch.tensor([1, 2, 3]))], (2, 3))
        tensor([11, 12, 13, 21, 22, 23])
    """
    total: Tensor | None = None
    for axes, term in sorted(terms, key=lambda item: item[1].numel()):
        shape = [1] * len(sizes)
        for axis in axes:
            shape[axis] = sizes[axis]
        view = term.reshape(shape)
        total = view if total is None else total + view
    assert total is not None
    return total.expand(tuple(sizes)).reshape(-1)


def _take(table: Tensor, dim: int, at: Tensor | None) -> Tensor:
    return table if at is None else table.index_select(dim, at)
