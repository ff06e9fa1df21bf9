"""The similarities of a tuple: one table, the positives straight from their rows, and formulas over inner products.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Family = Literal["product", "additive", "gram"]
Pair = Callable[[int, int], Tensor]

__all__ = ["SIMILARITIES", "Similarity", "heights", "of_pairs", "of_total", "positives", "safe_sqrt", "wide"]


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
