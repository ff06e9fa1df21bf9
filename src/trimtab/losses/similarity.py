"""The similarities of a tuple: one table, the positives straight from their rows, formulas over inner products, and the
node and pair tables that every similarity but the product can be computed from.

====================  ============================================================================  =========  ========
name                  ``s[t]`` with ``v_m = x_m[t_m]``, ``s = sum_m v_m``, ``q = |s|^2``               family     linear
====================  ============================================================================  =========  ========
``mip``               ``sum_d prod_m v_m[d]``                                                       product    no
``norm``              ``sqrt(q)``                                                                   additive   no
``sqnorm``            ``q``                                                                         additive   yes
``paircos``           mean cosine of the ``N(N-1)/2`` pairs                                         additive   yes
``dist2``             ``-1/N sum_m |v_m - s/N|^2``                                                  additive   yes
``dist``              ``-1/N sum_m |v_m - s/N|``                                                    gram       no
``cosmean``           signed geometric mean of the cosines between ``v_m`` and ``s``                gram       no
``volume``            minus the volume of the parallelepiped of the ``v_m``                         gram       no
====================  ============================================================================  =========  ========

*product* and *additive* ones are a function of one matrix product of super-rows; the *gram* ones need all pairs apart.
*linear* ones are sums over pairs, which opens the exact contraction.

**Node and pair tables** have no width left in them.
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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

import torch
from torch import Tensor

Family = Literal["product", "additive", "gram"]
Pair = Callable[[int, int], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """What the rest of the package must know about a similarity."""

    family: Family
    linear: bool = False
    """A sum over pairs of modalities."""
    normalize: str = "l2"
    """What ``normalize="auto"`` means for it."""


SIMILARITIES: dict[str, Similarity] = {
    "mip": Similarity(family="product", normalize="rms"),
    "norm": Similarity(family="additive"),
    "sqnorm": Similarity(family="additive", linear=True),
    "paircos": Similarity(family="additive", linear=True),
    "dist2": Similarity(family="additive", linear=True),
    "dist": Similarity(family="gram"),
    "cosmean": Similarity(family="gram"),
    "volume": Similarity(family="gram"),
}


def safe_sqrt(q: Tensor) -> Tensor:
    """Square root with value and gradient 0 at and below 0 (rounding makes small negatives); NaN stays NaN."""
    low = q <= 0
    return q.masked_fill(low, 1.0).sqrt().masked_fill(low, 0.0)


def of_total(name: str, q: Tensor, squares: Tensor, n: int) -> Tensor:
    """An additive similarity from ``q = |sum_m v_m|^2`` and ``squares = sum_m |v_m|^2``."""
    if name == "norm":
        return safe_sqrt(q)
    if name == "sqnorm":
        return q
    if name == "paircos":  # of unit rows
        return (q - squares) / (n * (n - 1))
    if name == "dist2":
        return (q / n - squares) / n
    raise ValueError(f"{name!r} is not a function of |sum|^2 alone.")


def of_pairs(name: str, pair: Pair, n: int) -> Tensor:
    """An additive or gram similarity from the inner products ``pair(m, k)`` of the tuple's vectors, broadcast freely.

    Elimination (for ``volume``) runs from modality 0 up: what is small should come first, so that it stays small.
    """
    if SIMILARITIES[name].family == "additive":
        squares = _add([pair(m, m) for m in range(n)])
        cross = _add([pair(m, k) for m in range(n) for k in range(m + 1, n)])
        return of_total(name, squares + 2 * cross, squares, n)
    if name == "volume":
        return -_volume_of_pairs(pair, n)
    dots = [_add([pair(min(m, k), max(m, k)) for k in range(n)]) for m in range(n)]  # <v_m, s>
    q = _add(dots)
    if name == "dist":
        return -_add([safe_sqrt(pair(m, m) - (2 / n) * dots[m] + q / n**2) for m in range(n)]) / n
    if name == "cosmean":
        return _cosmean(dots, [safe_sqrt(pair(m, m)) for m in range(n)], safe_sqrt(q))
    raise ValueError(f"{name!r} is not a function of inner products.")


def positives(xs: Sequence[Tensor], name: str) -> Tensor:
    """``s[i, .., i]`` of every sample, ``[B]``: from the rows, without the cancellation of inner products."""
    n = len(xs)
    if name == "mip":
        product = xs[0]
        for x in xs[1:]:
            product = product * x
        return product.sum(-1)
    total = _add(list(xs))
    if name in ("sqnorm", "paircos"):
        return of_total(name, total.square().sum(-1), _add([x.square().sum(-1) for x in xs]), n)
    if name == "norm":
        length: Tensor = torch.linalg.vector_norm(total, dim=-1)  # its gradient at 0 is 0
        return length
    if name == "dist2":
        return -_add([(x - total / n).square().sum(-1) for x in xs]) / n
    if name == "dist":
        return -_add([torch.linalg.vector_norm(x - total / n, dim=-1) for x in xs]) / n
    if name == "cosmean":
        lengths = [torch.linalg.vector_norm(x, dim=-1) for x in xs]
        return _cosmean([(x * total).sum(-1) for x in xs], lengths, torch.linalg.vector_norm(total, dim=-1))
    if name == "volume":
        return -heights(xs)[0]
    raise ValueError(f"unknown similarity {name!r}.")


def _add(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _cosmean(dots: Sequence[Tensor], lengths: Sequence[Tensor], total: Tensor) -> Tensor:
    """``prod sign(c_m) |c_m|^(1/N)``, root by root so that the product cannot underflow first."""
    n = len(dots)
    result = torch.ones_like(total)
    for dot, length in zip(dots, lengths, strict=True):
        size = length * total
        cosine = dot / size.masked_fill(size == 0, 1.0)
        # The root is infinitely steep at 0: there, and in the rounding around it, value and gradient are 0.
        zero = cosine.abs() <= 4 * torch.finfo(cosine.dtype).eps
        root = cosine.masked_fill(zero, 1.0)
        result = result * (root.sign() * root.abs().pow(1 / n)).masked_fill(zero, 0.0)
    return result


def wide(x: Tensor) -> Tensor:
    """In float64 (where there is one): inner products of near vectors, whose differences are looked at."""
    return x if x.device.type == "mps" else x.double()


def heights(xs: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The product of the heights, which is the volume, and a basis of what the rows span.

    By orthogonalisation done twice; a height lost in rounding counts as 0, its gradient and direction too.
    """
    tolerance = 8 * torch.finfo(xs[0].dtype).eps
    basis: list[Tensor] = []
    volume = torch.ones_like(xs[0][..., 0])
    for x in xs:
        rest = x
        for _ in range(2):
            for e in basis:
                rest = rest - (rest * e).sum(-1, keepdim=True) * e
        height = torch.linalg.vector_norm(rest, dim=-1)
        flat = height <= tolerance * torch.linalg.vector_norm(x, dim=-1)
        volume = volume * height.masked_fill(flat, 0.0)
        unit = rest / height.masked_fill(flat, 1.0).unsqueeze(-1)
        basis.append(unit.masked_fill(flat.unsqueeze(-1), 0.0))
    return volume, basis


def _volume_of_pairs(pair: Pair, n: int) -> Tensor:
    """The same from inner products: elimination, whose pivots are the squared heights."""
    left = {(i, j): pair(i, j) for i in range(n) for j in range(i, n)}
    tolerance = 4 * n * torch.finfo(left[0, 0].dtype).eps
    volume: Tensor | None = None
    for k in range(n):
        pivot = left[k, k]
        flat = pivot <= tolerance * pair(k, k)
        height = safe_sqrt(pivot.masked_fill(flat, 0.0))
        volume = height if volume is None else volume * height
        factor = {i: (left[k, i] / pivot.masked_fill(flat, 1.0)).masked_fill(flat, 0.0) for i in range(k + 1, n)}
        for i in range(k + 1, n):
            for j in range(i, n):
                left[i, j] = left[i, j] - factor[i] * left[k, j]
    assert volume is not None
    return volume


SUMMED = ("norm", "sqnorm", "paircos", "dist2")
"""Similarities that are a sum of the tables (norm: its root)."""

LINEAR = ("sqnorm", "paircos", "dist2")
"""Similarities that are a sum of the tables and nothing else."""

FORMULAS = ("dist", "cosmean", "volume")
"""Similarities that are another function of the tables."""


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
