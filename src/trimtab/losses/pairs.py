"""Node and pair tables: what every similarity but the product needs to know of the inputs, with no width left in it.

For ``norm``, ``sqnorm``, ``paircos`` and ``dist2`` the tables add up: the sum of ``node[m, t_m]`` over all modalities
and of ``pair[mn, t_m, t_n]`` over all pairs is the similarity of tuple ``t`` (its square, for ``norm``). The others are
functions of the same entries:

===========  =====================  ============================================================================
similarity   node                   pair
===========  =====================  ============================================================================
dist         0                      squared distances ``|x_m - x_n|^2``
volume       ``|x_m|^2``            squared distances
cosmean      ``|x_m|^2``            inner products ``<x_m, x_n>``
===========  =====================  ============================================================================

Squared distances come from float64 inner products whatever the inputs are: near pairs are what training makes, and
there the difference of two inner products in float32 would keep no digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from trimtab.losses.similarity import wide

SUMMED = ("norm", "sqnorm", "paircos", "dist2")
"""Similarities that are a sum of the tables (norm: its root)."""

LINEAR = ("sqnorm", "paircos", "dist2")
"""Similarities that are a sum of the tables and nothing else."""

FORMULAS = ("dist", "cosmean", "volume")
"""Similarities that are another function of the tables."""

__all__ = ["FORMULAS", "LINEAR", "SUMMED", "pair_list", "pair_tables"]


def pair_list(n: int) -> list[tuple[int, int]]:
    """The pairs ``m < n`` in the order of the pair table.

    Example:
        >>> pair_list(3)
        [(0, 1), (0, 2), (1, 2)]
    """
    return list(combinations(range(n), 2))


def pair_tables(xs: Sequence[Tensor], similarity: str, factor: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """``node [N, B]`` and ``pair [N(N-1)/2, B, B]`` of one similarity times a factor, differentiable in all of them.

    ``paircos`` takes its rows as they are: unit rows, as a `Problem` has them.

    Example:
        >>> xs = [torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])]
        >>> node, pair = pair_tables(xs, "sqnorm")
        >>> node[0, 0] + node[1, 0] + pair[0, 0, 0]  # |(1, 0) + (3, 0)|^2
        tensor(16.)
    """
    n = len(xs)
    if similarity not in SUMMED + FORMULAS:
        raise ValueError(f"similarity is {similarity!r}: tables exist for {', '.join(SUMMED + FORMULAS)}.")
    rows = torch.stack(list(xs))
    if similarity == "paircos":
        return rows.new_zeros(rows.shape[:2]), _inner(rows, factor * (2 / (n * (n - 1))))
    if similarity in ("dist", "volume"):
        return _distances(rows, factor, with_node=similarity == "volume")
    square = rows.square().sum(-1)
    if similarity in ("norm", "sqnorm"):
        return square * factor, _inner(rows, factor * 2)
    if similarity == "dist2":
        return square * (factor * (1 / n**2 - 1 / n)), _inner(rows, factor * (2 / n**2))
    return square * factor, _inner(rows, factor)


def _inner(rows: Tensor, factor: Tensor | float) -> Tensor:
    """Inner products of all pairs, N - 1 products of one modality with all later ones."""
    n, b, _ = rows.shape
    scaled = rows * factor  # on the rows the factor costs nothing, backward too
    lines = [scaled[m] @ rows[m + 1 :].flatten(0, 1).T for m in range(n - 1)]
    return torch.cat([line.reshape(b, -1, b).transpose(0, 1) for line in lines])


def _distances(rows: Tensor, factor: Tensor | float, *, with_node: bool) -> tuple[Tensor, Tensor]:
    exact = wide(rows)
    square = exact.square().sum(-1)
    both = torch.stack([square[m, :, None] + square[n, None] for m, n in pair_list(len(rows))])
    apart = both - _inner(exact, 2)
    # Below the rounding of its parts a distance is zero, so that equal rows are equal.
    apart = torch.where(apart.detach() < 16 * torch.finfo(exact.dtype).eps * both.detach(), 0.0, apart)
    node = square if with_node else torch.zeros_like(square)
    return node.to(rows.dtype) * factor, apart.to(rows.dtype) * factor
