"""How the lattice of all tuples is cut into tiles, and the tiles of similarities that are a sum of tables.

A super-row is an index of the left modalities; all but the last of them make up its *outer* part. A tile holds some
outers, all of the last left modality, and some columns: ``[outers, last, columns]``. With ``H_u[i, q]`` the sum of the
pairs between left modality ``u`` and all right ones, its logits are ``a_p + H_last[p_last, q] + sum_u H_u[p_u, q]``.
The last sum has no ``last`` axis: two additions a tuple, whatever N is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from trimtab.losses.entries import Term, outer_sum

Pull = Callable[[Tensor], None]
"""Takes the weights of a tile's logits and adds what follows for the tables to their gradients."""

__all__ = ["Block", "Family", "Lattice", "Pull", "Summed", "blocks_of", "summed_tables"]


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

    def outer_index(self, block: Block, device: torch.device) -> list[Any]:
        """For each outer modality, its index in every outer part of the block: a number where there is but one."""
        o = block.outers
        flat: Any = o.start if o.stop - o.start == 1 else torch.arange(o.start, o.stop, device=device)
        index: list[Any] = []
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
