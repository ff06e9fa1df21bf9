"""What both ways of contracting share: groups, blocks of rows, and gradients gathered back into tables."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimtab.losses.problem import Precision

__all__ = ["Gathered", "Groups", "Places", "lattice_views", "spans", "split"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where the positives are: super-rows of the three groups, in order, here and on the device."""

    host: tuple[list[int], list[int], list[int]]
    groups: tuple[Tensor, Tensor, Tensor]

    def put(self, block: Tensor, at: slice, column: int, values: Tensor | None = None) -> None:
        """Overwrite their entries in a block of rows, with zeros where no values are given."""
        rows, here = self._rows(0, at)
        if here.start < here.stop:
            new = block.new_zeros(()) if values is None else values[here].to(block.dtype)
            block[rows, self.groups[column][here]] = new

    def add(self, block: Tensor, at: slice, group: int, values: Tensor) -> None:
        """Add one row of values to the row of each, in a block of rows of a group."""
        rows, here = self._rows(group, at)
        if here.start < here.stop:
            block.index_add_(0, rows, values[here])

    def _rows(self, group: int, at: slice) -> tuple[Tensor, slice]:
        here = slice(bisect_left(self.host[group], at.start), bisect_left(self.host[group], at.stop))
        rows = self.groups[group][here]
        return (rows - at.start if at.start else rows), here


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Three groups of modalities and how to work on them."""

    sizes: tuple[tuple[int, ...], ...]
    cuts: tuple[int, ...]
    precision: Precision
    chunk: int
    """Entries of a block of rows."""


class Gathered:
    """Owns the gradients of the tables whose sum is a matrix, and takes that of the matrix block by block."""

    def __init__(self, group: int, width: int, groups: Groups, like: Tensor, *, with_rows: bool = False) -> None:
        self.sizes = groups.sizes[group]
        self.tables = [like.new_zeros(size, width) for size in self.sizes]
        self.by_row = like.new_empty(math.prod(self.sizes) if with_rows else 0)
        self.with_rows, self.chunk = with_rows, groups.chunk

    def spans(self) -> Iterator[slice]:
        """Blocks of rows: whole indices of the first modality."""
        return spans(self.sizes, self.tables[0].shape[1], self.chunk)

    def take(self, at: slice, matrix: Tensor) -> None:
        """The sums of a block of rows over what each table does not know; every block once."""
        inner = math.prod(self.sizes[1:])
        first = slice(at.start // inner, at.stop // inner)
        if self.with_rows:
            torch.sum(matrix, 1, out=self.by_row[at])
        lattice = matrix.view(first.stop - first.start, *self.sizes[1:], -1)
        for m, table in enumerate(self.tables):
            others = [k for k in range(len(self.sizes)) if k != m]
            if not others:
                table[first] = lattice
            elif m == 0:
                torch.sum(lattice, others, out=table[first])
            else:
                table += lattice.sum(others)


def split(tables: Sequence[Tensor], groups: Groups) -> tuple[Sequence[Tensor], ...]:
    """The tables of ``a``, ``b`` and ``c`` from one list."""
    p, q = len(groups.sizes[0]), len(groups.sizes[1])
    return tables[:p], tables[p : p + q], tables[p + q :]


def spans(sizes: Sequence[int], width: int, chunk: int) -> Iterator[slice]:
    """Blocks of about ``chunk`` entries: rows of whole indices of the first modality."""
    inner = math.prod(sizes[1:])
    step = max(1, chunk // (inner * width))
    for i in range(0, sizes[0], step):
        yield slice(i * inner, min(i + step, sizes[0]) * inner)


def lattice_views(tables: Sequence[Tensor], at: slice) -> list[Tensor]:
    """The tables as seen by a block of rows: one axis per modality, and the columns."""
    sizes, width = [t.shape[0] for t in tables], tables[0].shape[1]
    inner = math.prod(sizes[1:])
    first = tables[0][at.start // inner : at.stop // inner]
    ones = [1] * len(sizes)
    views = [first.reshape(first.shape[0], *ones[1:], width)]
    for m, table in enumerate(tables[1:], start=1):
        views.append(table.reshape(*ones[:m], sizes[m], *ones[m + 1 :], width))
    return views
