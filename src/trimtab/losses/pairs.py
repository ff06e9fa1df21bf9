"""Node and pair tables: what every similarity but the product needs to know of the inputs, with no width left in it.

For ``norm``, ``sqnorm``, ``paircos`` and ``dist2`` the tables add up: the sum of ``node[m, t_m]`` over all modalities and
of ``pair[mn, t_m, t_n]`` over all pairs is the similarity of tuple ``t`` (its square, for ``norm``). The others are
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

SUMMED = ("norm", "sqnorm", "paircos", "dist2")
"""Similarities that are a sum of the tables (norm: its root)."""

LINEAR = ("sqnorm", "paircos", "dist2")
"""Similarities that are a sum of the tables and nothing else."""

FORMULAS = ("dist", "cosmean", "volume")
"""Similarities that are another function of the tables."""

__all__ = ["FORMULAS", "LINEAR", "SUMMED", "pair_list", "pair_tables", "unit_rows"]


def pair_list(n: int) -> list[tuple[int, int]]:
    """The pairs ``m < n`` in the order of the pair table.

    Example:
        >>> pair_list(3)
        [(0, 1), (0, 2), (1, 2)]
    """
    return list(combinations(range(n), 2))


def pair_tables(xs: Sequence[Tensor], similarity: str) -> tuple[Tensor, Tensor]:
    """``node [N, B]`` and ``pair [N(N-1)/2, B, B]`` of one similarity, differentiable in the inputs.

    Example:
        >>> xs = [torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, 1.0]])]
        >>> node, pair = pair_tables(xs, "sqnorm")
        >>> node[0, 0] + node[1, 0] + pair[0, 0, 0]  # |(1, 0) + (3, 0)|^2
        tensor(16.)
    """
    n = len(xs)
    if similarity not in SUMMED + FORMULAS:
        raise ValueError(f"similarity is {similarity!r}: tables exist for {', '.join(SUMMED + FORMULAS)}.")
    if similarity == "paircos":
        units = [unit_rows(x) for x in xs]
        return xs[0].new_zeros(n, xs[0].shape[0]), _inner(units).mul(2.0 / (n * (n - 1)))
    if similarity in ("dist", "volume"):
        return _distances(xs, with_node=similarity == "volume")
    square = torch.stack([x.square().sum(-1) for x in xs])
    if similarity in ("norm", "sqnorm"):
        return square, 2 * _inner(xs)
    if similarity == "dist2":
        return square * (1 / n**2 - 1 / n), _inner(xs) * (2 / n**2)
    return square, _inner(xs)


def unit_rows(x: Tensor) -> Tensor:
    """Rows of length 1 for any length of input; a zero row stays zero, with zero gradient."""
    largest = x.detach().abs().amax(-1, keepdim=True)
    x = x / torch.where(largest == 0, 1.0, largest)  # squares of 1e30 must not overflow; the direction knows no factor
    square = x.square().sum(-1, keepdim=True)
    return x * torch.where(square == 0, 1.0, square).rsqrt()


def _inner(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack([p @ q.T for p, q in combinations(xs, 2)])


def _distances(xs: Sequence[Tensor], *, with_node: bool) -> tuple[Tensor, Tensor]:
    dtype = xs[0].dtype
    wide = [x if x.device.type == "mps" else x.double() for x in xs]
    square = torch.stack([x.square().sum(-1) for x in wide])
    near = 16 * torch.finfo(wide[0].dtype).eps
    pairs = []
    for (m, n), inner in zip(pair_list(len(xs)), _inner(wide), strict=True):
        both = square[m, :, None] + square[n, None, :]
        apart = both - 2 * inner
        # Below the rounding of its parts a distance is zero, so that equal rows are equal.
        pairs.append(torch.where(apart.detach() < near * both.detach(), 0.0, apart))
    node = square if with_node else torch.zeros_like(square)
    return node.to(dtype), torch.stack(pairs).to(dtype)
