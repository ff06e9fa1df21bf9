"""How the lattice of all tuples is cut into tiles, and the tiles of each similarity.

A super-row is an index of the left modalities; all but the last of them make up its *outer* part. A tile holds some
outers, all of the last left modality, and some columns: ``[outers, last, columns]``. With ``H_u[i, q]`` the sum of the
pairs between left modality ``u`` and all right ones, its logits are ``a_p + H_last[p_last, q] + sum_u H_u[p_u, q]``.
The last sum has no ``last`` axis: two additions a tuple, whatever N is.

That is for similarities that are a sum of tables (`Summed`). The others (`Formula`: mean distance, geometric mean of
cosines, volume) use autograd inside the tile. Every entry is a view that has only the axes it depends on,
``[outers, last, right_1, .., right_k]``, and combines with
others of few axes first: most of the work is done on shapes far smaller than the tile, in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Context
from trimtab.losses.similarity import pair_list
from trimtab.losses.tuple_reduction import Term, outer_sum

Pull = Callable[[Tensor], None]
"""Takes the weights of a tile's logits and adds what follows for the tables to their gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lattice:
    """Sizes of the modalities, and how many of them are on the left."""

    sizes: tuple[int, ...]
    left: int

    @property
    def outer_sizes(self) -> tuple[int, ...]:
        """Of the left modalities but the last."""
        return self.sizes[: self.left - 1]

    @property
    def outers(self) -> int:
        """How many outer parts there are."""
        return math.prod(self.outer_sizes)

    @property
    def last(self) -> int:
        """Size of the last left modality."""
        return self.sizes[self.left - 1]

    @property
    def right_sizes(self) -> tuple[int, ...]:
        """Of the right modalities."""
        return self.sizes[self.left :]

    @property
    def columns(self) -> int:
        """How many super-columns there are."""
        return math.prod(self.right_sizes)

    def outer_index(self, block: Block, device: torch.device) -> list[int | Tensor]:
        """For each outer modality, its index in every outer part of the block: a number where there is but one."""
        o = block.outers
        flat: int | Tensor = o.start if o.stop - o.start == 1 else torch.arange(o.start, o.stop, device=device)
        index: list[int | Tensor] = []
        for size in reversed(self.outer_sizes):
            index.insert(0, flat % size)
            flat = flat // size
        return index


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """The place of one tile."""

    outers: slice
    first: slice
    """Of the first right modality."""
    columns: slice


class Family(Protocol):
    """How one kind of similarity computes its tiles."""

    def logits(self, block: Block) -> Tensor:
        """The logits of a tile, in a tensor the caller may overwrite."""
        ...

    def open(self, block: Block) -> tuple[Tensor, Pull]:
        """The logits, which must stay as they are, and the way back."""
        ...

    def gradients(self) -> list[Tensor]:
        """Of the tables, after all tiles have been pulled."""
        ...


def blocks_of(lattice: Lattice, chunk: int) -> Iterator[Block]:
    """Tiles of about ``chunk`` tuples: whole outers where they fit, else parts of one outer."""
    rest = lattice.columns // lattice.right_sizes[0]
    width = lattice.right_sizes[0]
    outers = max(1, chunk // (lattice.last * lattice.columns))
    firsts = width if outers > 1 else min(width, max(1, chunk // (lattice.last * rest)))
    for o in range(0, lattice.outers, outers):
        for f in range(0, width, firsts):
            end = min(f + firsts, width)
            yield Block(
                outers=slice(o, min(o + outers, lattice.outers)),
                first=slice(f, end),
                columns=slice(f * rest, end * rest),
            )


def summed_tables(nodes: Sequence[Tensor], pairs: dict[tuple[int, int], Tensor], lattice: Lattice) -> list[Tensor]:
    """``a [rows]`` and one ``H_u [size_u, columns]`` per left modality; the last has what the right ones give alone."""
    n, left, sizes = len(nodes), lattice.left, lattice.sizes
    terms: list[Term] = [((m,), nodes[m]) for m in range(left)]
    terms += [((m, k), pairs[m, k]) for m in range(left) for k in range(m + 1, left)]
    tables = [outer_sum(terms, sizes[:left])]
    for u in range(left):
        across: list[Term] = [((0, k - left + 1), pairs[u, k]) for k in range(left, n)]
        if u == left - 1:
            across += [((k - left + 1,), nodes[k]) for k in range(left, n)]
            across += [((k - left + 1, j - left + 1), pairs[k, j]) for k in range(left, n) for j in range(k + 1, n)]
        tables.append(outer_sum(across, (sizes[u], *lattice.right_sizes)).reshape(sizes[u], -1))
    return tables


class Summed:
    """Tiles of a sum of tables, or of its root; owns the gradients it gathers."""

    def __init__(self, tables: Sequence[Tensor], lattice: Lattice, *, root: bool) -> None:
        self.lattice, self.root = lattice, root
        self.a = tables[0].reshape(lattice.outers, lattice.last)
        self.across, self.inner = list(tables[1:-1]), tables[-1]
        self.grads: list[Tensor] = []

    def logits(self, block: Block) -> Tensor:
        """``a + H_last + the outer sum``, and its root for ``norm``."""
        s = self._shared(block, self.inner[:, block.columns].unsqueeze(0))
        s += self.a[block.outers].unsqueeze(-1)
        return s.clamp_min_(0).sqrt_() if self.root else s

    def open(self, block: Block) -> tuple[Tensor, Pull]:
        """The logits, and sums of the weights over what each table does not know."""
        z = self.logits(block)
        if not self.grads:
            self.grads = [torch.zeros_like(t) for t in (self.a, *self.across, self.inner)]
        d_a, *d_across, d_inner = self.grads

        def pull(w: Tensor) -> None:
            if self.root:  # the derivative 1 / 2z; the half comes with the gradients
                w.div_(z)
                if z.device.type != "cpu" or not bool(z.amin() > 0):
                    w.masked_fill_(z == 0, 0.0)  # the root of nothing has no direction
            d_a[block.outers] += w.sum(-1)
            single = w.shape[0] == 1
            d_inner[:, block.columns] += w.squeeze(0) if single else w.sum(0)
            if d_across:
                shared = w.sum(1)
                for grad, i in zip(d_across, self.lattice.outer_index(block, w.device), strict=True):
                    if isinstance(i, int):
                        grad[i, block.columns] += shared[0]
                    else:
                        grad[:, block.columns].index_add_(0, i, shared)

        return z, pull

    def gradients(self) -> list[Tensor]:
        """Of ``a`` and the ``H_u``."""
        factor = 0.5 if self.root else 1.0
        first, *others = (g.mul_(factor) for g in self.grads)
        return [first.reshape(-1), *others]

    def _shared(self, block: Block, inner: Tensor) -> Tensor:
        if not self.across:
            return inner.clone()
        index = self.lattice.outer_index(block, inner.device)
        first, *others = (h[i, block.columns] for h, i in zip(self.across, index, strict=True))
        return inner + sum(others, start=first).reshape(-1, 1, inner.shape[-1])


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

    def _index(self, m: int) -> int | slice | Tensor:
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
    def forward(ctx: Context, x: Tensor) -> Tensor:
        root = x.clamp_min(0).sqrt_()
        ctx.save_for_backward(root)
        return root

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, g: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        slope: Tensor = (g / (2 * root)).masked_fill_(root == 0, 0.0)
        return slope


class _Pivot(torch.autograd.Function):
    """Root and inverse of a pivot; both 0, with zero gradient, where it is below the rounding of its diagonal."""

    @staticmethod
    def forward(ctx: Context, pivot: Tensor, diagonal: Tensor) -> tuple[Tensor, Tensor]:
        dead = pivot <= 16 * torch.finfo(pivot.dtype).eps * diagonal
        root = pivot.clamp_min(0).sqrt_().masked_fill_(dead, 0.0)
        inverse = pivot.reciprocal().masked_fill_(dead, 0.0)
        ctx.save_for_backward(root, inverse)
        return root, inverse

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, g_root: Tensor, g_inverse: Tensor) -> tuple[Tensor, None]:
        root, inverse = ctx.saved_tensors
        return (g_root * root / 2 - g_inverse * inverse) * inverse, None


class _ShapesContext(Context, Protocol):
    shapes: tuple[torch.Size, ...]


class _GeometricMean(torch.autograd.Function):
    """``sign * (prod |y_m| / |s|)^(1/N)`` from ``|s|^2`` and ``y_m = <x_m, s> / |x_m|``.

    Its slope at a cosine of 0 is infinite: cosines below rounding count as large as rounding, in the gradient alone.
    """

    @staticmethod
    def forward(ctx: _ShapesContext, square: Tensor, *along: Tensor) -> Tensor:
        inverse = torch.where(square <= 0, 0.0, torch.where(square <= 0, 1.0, square).rsqrt())
        n = len(along)
        cosines = [y * inverse for y in along]
        # In two halves: the product of eight small cosines may be below the range of float32.
        roots = []
        for half in (cosines[: n // 2], cosines[n // 2 :]):
            product = half[0]
            for c in half[1:]:
                product = product * c
            roots.append(product.sign() * product.abs().pow_(1.0 / n))
        value = roots[1] * roots[0]
        ctx.save_for_backward(value, inverse, *cosines)
        ctx.shapes = (square.shape, *(y.shape for y in along))
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: _ShapesContext, g: Tensor) -> tuple[Tensor, ...]:
        value, inverse, *cosines = ctx.saved_tensors
        small = 4 * torch.finfo(value.dtype).eps
        weighted = g * value * inverse
        grads = [-0.5 * weighted * inverse]
        for c in cosines:
            grads.append(weighted / (torch.where(c.abs() < small, torch.where(c < 0, -small, small), c) * len(cosines)))
        return tuple(x.sum_to_size(shape) for x, shape in zip(grads, ctx.shapes, strict=True))
