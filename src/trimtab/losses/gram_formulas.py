"""Similarities that are no sum of tables: mean distance, geometric mean of cosines, volume. Autograd inside the tile.

Every entry is a view that has only the axes it depends on, ``[outers, last, right_1, .., right_k]``, and combines with
others of few axes first: most of the work is done on shapes far smaller than the tile, in both directions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.gram_tiles import Block, Lattice, Pull
from trimtab.losses.pairs import pair_list

__all__ = ["Formula", "formula_tables"]

Nodes = list[Tensor]
Pairs = dict[tuple[int, int], Tensor]


def formula_tables(name: str, nodes: Sequence[Tensor], pairs: Pairs) -> list[Tensor]:
    """The tables as one flat list: N nodes, the pairs, and for cosines N inverse lengths."""
    tables = [*nodes, *(pairs[p] for p in pair_list(len(nodes)))]
    if name == "cosmean":
        tables += [torch.where(v == 0, 0.0, torch.where(v == 0, 1.0, v).rsqrt()) for v in nodes]
    return tables


class Formula:
    """Tiles of a formula; owns the gradients it gathers."""

    def __init__(self, tables: Sequence[Tensor], lattice: Lattice, name: str) -> None:
        self.lattice, self.name = lattice, name
        self.tables = [t.detach() for t in tables]
        self.grads = [torch.zeros_like(t) for t in tables]

    def logits(self, block: Block) -> Tensor:
        """The formula times the scale."""
        with torch.no_grad():
            return self._logits(self.tables, block).contiguous()

    def open(self, block: Block) -> tuple[Tensor, Pull]:
        """The logits, and autograd's way back from them to the tables."""
        leaves = [t.requires_grad_() for t in (t.detach() for t in self.tables)]
        with torch.enable_grad():
            z = self._logits(leaves, block)

        def pull(w: Tensor) -> None:
            found = torch.autograd.grad(z, leaves, w, allow_unused=True)
            for grad, more in zip(self.grads, found, strict=True):
                if more is not None:
                    grad += more

        return z.detach(), pull

    def gradients(self) -> list[Tensor]:
        """Of nodes, pairs, inverse lengths and scale."""
        return self.grads

    def _logits(self, tables: Sequence[Tensor], block: Block) -> Tensor:
        lattice, n = self.lattice, len(self.lattice.sizes)
        views = _Views(lattice, block, tables[0].device)
        nodes = [views.node(m, t) for m, t in enumerate(tables[:n])]
        spots = pair_list(n)
        pairs = {p: views.pair(*p, t) for p, t in zip(spots, tables[n : n + len(spots)], strict=True)}
        if self.name == "dist":
            s = _dist(n, pairs)
        elif self.name == "volume":
            s = _volume(nodes, pairs)
        else:
            inverse = [views.node(m, t) for m, t in enumerate(tables[n + len(spots) : -1])]
            s = _cosmean(nodes, pairs, inverse)
        o, c = block.outers, block.columns
        shape = (o.stop - o.start, lattice.last, block.first.stop - block.first.start, *lattice.right_sizes[1:])
        return (s * tables[-1]).expand(shape).reshape(o.stop - o.start, lattice.last, c.stop - c.start)


class _Views:
    """Tables seen from one tile."""

    def __init__(self, lattice: Lattice, block: Block, device: torch.device) -> None:
        self.left, self.axes = lattice.left, len(lattice.right_sizes) + 2
        index = lattice.outer_index(block, device)
        self.outer = [torch.tensor([i], device=device) if isinstance(i, int) else i for i in index]
        self.first = block.first

    def node(self, m: int, table: Tensor) -> Tensor:
        """A vector of modality m."""
        return self._shape(table[self._index(m)], (m,))

    def pair(self, m: int, n: int, table: Tensor) -> Tensor:
        """A matrix of modalities m < n."""
        if n < self.left - 1:
            return self._shape(table[self.outer[m], self.outer[n]], (m,))
        return self._shape(table[self._index(m)][:, self._index(n)], (m, n))

    def _index(self, m: int) -> Any:
        if m < self.left - 1:
            return self.outer[m]
        return self.first if m == self.left else slice(None)

    def _axis(self, m: int) -> int:
        return max(0, m - self.left + 2)

    def _shape(self, table: Tensor, modalities: tuple[int, ...]) -> Tensor:
        shape = [1] * self.axes
        for m, size in zip(modalities, table.shape, strict=True):
            shape[self._axis(m)] = size
        return table.reshape(shape)


def _add(terms: Sequence[Tensor]) -> Tensor:
    """A sum that stays small as long as it can: without the last left axis, with it, then both."""
    groups: dict[tuple[bool, bool], Tensor] = {}
    for term in sorted(terms, key=lambda t: t.numel()):
        key = (term.shape[0] > 1, term.shape[1] > 1)
        groups[key] = groups[key] + term if key in groups else term
    first, *others = sorted(groups.values(), key=lambda t: t.numel())
    for term in others:
        first = first + term
    return first


def _of(pairs: Pairs, m: int, n: int) -> Tensor:
    return pairs[min(m, n), max(m, n)]


def _dist(n: int, pairs: Pairs) -> Tensor:
    """``-mean_m |x_m - mean|``: the squares are means of squared distances to the others, less the mean of all."""
    spread = _add(list(pairs.values())) / n**2
    total: Tensor | None = None
    for m in range(n):
        square = _add([_of(pairs, m, k) for k in range(n) if k != m]) / n - spread
        root: Tensor = _Root.apply(square)  # type: ignore[no-untyped-call]
        total = root if total is None else total + root
    assert total is not None
    return total / -n


def _cosmean(nodes: Nodes, pairs: Pairs, inverse: Nodes) -> Tensor:
    """Signed geometric mean of the cosines between each vector and the sum."""
    n = len(nodes)
    along = [_add([nodes[m]] + [_of(pairs, m, k) for k in range(n) if k != m]) for m in range(n)]
    square = _add(nodes + [2 * p for p in pairs.values()])
    cosines = [y * r for y, r in zip(along, inverse, strict=True)]
    result: Tensor = _GeometricMean.apply(square, *cosines)  # type: ignore[no-untyped-call]
    return result


def _volume(nodes: Nodes, pairs: Pairs) -> Tensor:
    """``-sqrt(det Gram)`` by elimination on ``x_0, x_1 - x_0, ..``: the same volume, no cancellation of near vectors.

    No pivoting: the matrix is positive semidefinite, and a pivot below rounding has a row below rounding.
    """
    n = len(nodes)
    base = nodes[0]
    order = [*range(1, n)]
    side = {m: (nodes[m] - base - pairs[0, m]) / 2 for m in order}
    rest: Pairs = {}
    for m in order:
        rest[m, m] = pairs[0, m]
        for k in range(m + 1, n):
            rest[m, k] = (pairs[0, m] + pairs[0, k] - pairs[m, k]) / 2
    scale = {m: pairs[0, m].detach() for m in order}
    volume: Tensor
    volume, inverse = _Pivot.apply(base, base.detach())  # type: ignore[no-untyped-call]
    for (m, k), value in rest.items():
        rest[m, k] = value - side[m] * (side[k] * inverse)
    for at, m in enumerate(order):
        root, inverse = _Pivot.apply(rest[m, m], scale[m])  # type: ignore[no-untyped-call]
        volume = volume * root
        later = order[at + 1 :]
        for i, k in enumerate(later):
            factor = rest[m, k] * inverse
            for j in later[i:]:
                rest[k, j] = rest[k, j] - factor * rest[m, j]
    return -volume


class _Root(torch.autograd.Function):
    """``sqrt(max(x, 0))`` with gradient 0 at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        root = x.clamp_min(0).sqrt_()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        slope: Tensor = (g / (2 * root)).masked_fill_(root == 0, 0.0)
        return slope


class _Pivot(torch.autograd.Function):
    """Root and inverse of a pivot; both 0, with zero gradient, where it is below the rounding of its diagonal."""

    @staticmethod
    def forward(ctx: Any, pivot: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
        dead = pivot <= 16 * torch.finfo(pivot.dtype).eps * diagonal
        root = pivot.clamp_min(0).sqrt_().masked_fill_(dead, 0.0)
        inverse = pivot.reciprocal().masked_fill_(dead, 0.0)
        ctx.save_for_backward(root, inverse)
        return root, inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_root: Tensor, g_inverse: Tensor) -> tuple[Tensor, None]:
        root, inverse = ctx.saved_tensors
        return (g_root * root / 2 - g_inverse * inverse) * inverse, None


class _GeometricMean(torch.autograd.Function):
    """``sign * (prod |y_m| / |s|)^(1/N)`` from ``|s|^2`` and ``y_m = <x_m, s> / |x_m|``.

    Its slope at a cosine of 0 is infinite: cosines below rounding count as large as rounding, in the gradient alone.
    """

    @staticmethod
    def forward(ctx: Any, square: Tensor, *along: Tensor) -> Tensor:
        inverse = torch.where(square <= 0, 0.0, torch.where(square <= 0, 1.0, square).rsqrt())
        n = len(along)
        cosines = [y * inverse for y in along]
        # In two halves: the product of eight small cosines may be below the range of float32.
        value: Any = 1.0
        for half in (cosines[: n // 2], cosines[n // 2 :]):
            product = half[0]
            for c in half[1:]:
                product = product * c
            value = product.sign() * product.abs().pow_(1.0 / n) * value
        ctx.save_for_backward(value, inverse, *cosines)
        ctx.shapes = (square.shape, *(y.shape for y in along))
        result: Tensor = value
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, ...]:
        value, inverse, *cosines = ctx.saved_tensors
        small = 4 * torch.finfo(value.dtype).eps
        weighted = g * value * inverse
        grads = [-0.5 * weighted * inverse]
        for c in cosines:
            grads.append(weighted / (torch.where(c.abs() < small, torch.where(c < 0, -small, small), c) * len(cosines)))
        return tuple(x.sum_to_size(shape) for x, shape in zip(grads, ctx.shapes, strict=True))
