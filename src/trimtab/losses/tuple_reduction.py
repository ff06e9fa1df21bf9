"""Reductions that all backends share: candidates to one number, super-rows to anchors, samples that take part.

A tuple has two sides: super-rows ``p`` of the first half of the modalities, ``q`` of the rest.
``t = (p, q)`` with ``p`` in ``B^l``, ``l = N // 2``, and ``q`` in ``B^(N-l)``, both numbered in row-major order. The
reductions of all anchors follow from one reduction per super-row: all ``t`` with ``t_m = i`` are all ``p`` with
``p_m = i``, each with all ``q``.

A mask and a share both leave out samples of single modalities: the tables are cut to those that remain, so that no loop
over tuples ever meets an absent entry. A share is a contiguous part of the samples of modality 0.

Large matrix products are made in the precision a problem asks for (`products_in`, `multiply`).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Context, Kind, Precision, Problem
from trimtab.losses.similarity import pair_list


def empty(kind: Kind) -> float:
    """The reduction over no tuples at all."""
    return -torch.inf if kind == "lse" else 0.0


def log1pexp(x: Tensor) -> Tensor:
    """``log(1 + exp(x))`` to full relative precision at both ends (``F.softplus`` cuts off at 20)."""
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


class _Lse(torch.autograd.Function):
    """log-sum-exp whose gradient is 0, not NaN, where there is nothing to sum."""

    @staticmethod
    def forward(ctx: Context, z: Tensor, dim: int) -> Tensor:
        top = z.amax(dim, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)
        out = (z - top).exp_().sum(dim, keepdim=True).log_().add_(top)
        ctx.save_for_backward(z, out)
        return out.squeeze(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:
        z, out = ctx.saved_tensors
        weight = (z - out.masked_fill(out == -torch.inf, 0.0)).exp_()
        return weight.mul_(grad.reshape(out.shape)), None


def lse(z: Tensor, dim: int) -> Tensor:
    """``log sum exp z`` along ``dim``; ``-inf`` with zero gradient where all entries are ``-inf``; NaN stays NaN."""
    result: Tensor = _Lse.apply(z, dim)  # type: ignore[no-untyped-call]
    return result


def candidates(z: Tensor, valid: Tensor, kind: Kind, bias: Tensor | None) -> Tensor:
    """What `reduce_all` sums up: the logits (or their softplus), and nothing where an entry is not ``valid``."""
    if kind == "softplus":
        z = log1pexp(z if bias is None else z + bias)
    return z.masked_fill(~valid, empty(kind))


def reduce_all(z: Tensor, kind: Kind, dim: int) -> Tensor:
    """`candidates` (or earlier reductions) to one number along ``dim``."""
    return lse(z, dim) if kind == "lse" else z.sum(dim)


def outer(parts: Sequence[Tensor], *, product: bool) -> Tensor:
    """``[B^k, ..]``: products (or sums) of one row of each of the k parts ``[B, ..]``."""
    result = parts[0]
    for part in parts[1:]:
        left, right = result.unsqueeze(1), part.unsqueeze(0)
        result = (left * right if product else left + right).flatten(0, 1)
    return result


def diagonal_stride(batch: int, k: int) -> int:
    """Super-row ``(i, .., i)`` of k modalities has the number ``i * diagonal_stride``."""
    return sum(batch**e for e in range(k))


def share_of(count: int, share: tuple[int, int]) -> tuple[int, int]:
    """Begin and end of the k-th of n near-equal parts of ``range(count)``."""
    k, n = share
    return count * k // n, count * (k + 1) // n


def marginals(left: Tensor, right: Tensor, num: int, kind: Kind) -> Tensor:
    """``[N, B]`` from the reductions per super-row of both sides, ``[B^l]`` and ``[B^(N-l)]``."""
    rows = []
    for side, k in ((left, num // 2), (right, num - num // 2)):
        batch = round(side.shape[0] ** (1 / k))
        table = side.reshape([batch] * k)
        for m in range(k):
            lines = table.movedim(m, 0).reshape(batch, -1)
            rows.append(reduce_all(lines, kind, 1))
    return torch.stack(rows)


Term = tuple[tuple[int, ...], Tensor]
"""The axes a table has, and the table."""


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


_OUT_DTYPE = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)  # torch.mm(..., out_dtype=)


@contextmanager
def products_in(precision: Precision, device: torch.device) -> Iterator[None]:
    """No autocast, and on CUDA products in TF32 exactly where ``precision`` says so, whatever the global switch."""
    with torch.autocast(device.type, enabled=False):
        if device.type != "cuda":
            yield
            return
        wanted = _Wanted(tf32=precision == "tf32")
        wanted.enter()
        try:
            yield
        finally:
            wanted.leave()


class _Wanted:
    """One use of the switch, which is the whole process's: the last one to leave puts back what the first one found.

    Backward passes of several cards run in threads of their own. Were each to put back what it found, the setting of
    one that ended later could stay for good.
    """

    lock = threading.Lock()
    inside: ClassVar[list[_Wanted]] = []
    before: ClassVar[Any] = None

    def __init__(self, *, tf32: bool) -> None:
        self.switch: Any = torch.backends.cuda.matmul
        # torch 2.9 and later have the first; reading the old name there mixes two interfaces.
        self.name = "fp32_precision" if hasattr(self.switch, "fp32_precision") else "allow_tf32"
        self.value: Any = tf32 if self.name == "allow_tf32" else "tf32" if tf32 else "ieee"

    def enter(self) -> None:
        """Set the switch."""
        with self.lock:
            if not self.inside:
                type(self).before = getattr(self.switch, self.name)
            self.inside.append(self)
            setattr(self.switch, self.name, self.value)

    def leave(self) -> None:
        """Set it for whoever entered last and is still inside, or as it was."""
        with self.lock:
            self.inside.remove(self)
            setattr(self.switch, self.name, self.inside[-1].value if self.inside else self.before)


def operand(x: Tensor, precision: Precision) -> Tensor:
    """``x`` as an operand of `multiply`: rounded to bfloat16 where the product shall be one of those."""
    return x.bfloat16() if precision == "bf16" and x.is_cuda and x.dtype == torch.float32 else x


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``; bfloat16 operands give a float32 result that was never rounded to bfloat16."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if _OUT_DTYPE:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
