"""The ways to the same N-way loss that `benchmarks/nway.py` compares: published formulas written by hand, and ours."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

Way = Callable[[Sequence[Tensor], float], Tensor]
Count = Callable[[int, int, int], float]
CLIP = "CLIP"
"""The problem of two modalities and a large batch."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table: a loss, and what it costs by counting (floating-point operations, bytes)."""

    problem: str
    name: str
    run: Way
    flops: Count | None = None
    memory: Count | None = None


def full_cross_entropy(logits: Tensor) -> Tensor:
    """Every sample of every modality against all tuples that hold it."""
    b, n = logits.shape[0], logits.dim()
    i = torch.arange(b)
    right = sum(i * b**k for k in range(n - 1))
    return torch.stack([F.cross_entropy(logits.movedim(m, 0).reshape(b, -1), right) for m in range(n)]).mean()


def one_axis_cross_entropy(logits: Tensor) -> Tensor:
    """The six-way default: cross-entropy over dim 1 of the N rotations of the whole tensor, one label per line."""
    b, n = logits.shape[0], logits.dim()
    labels = torch.zeros_like(logits)
    labels[(torch.arange(b),) * n] = 1.0
    turns = [[(r + k) % n for k in range(n)] for r in range(n)]
    return torch.stack([F.cross_entropy(logits.permute(t), labels, reduction="sum") for t in turns]).mean() / b


def rows_of(xs: Sequence[Tensor]) -> list[Tensor]:
    """Each modality shaped so that broadcasting makes ``[B] * N + [D]`` of them."""
    n, (b, d) = len(xs), xs[0].shape
    return [x.reshape([1] * m + [b] + [1] * (n - 1 - m) + [d]) for m, x in enumerate(xs)]


def norm_with_width(xs: Sequence[Tensor], scale: float) -> Tensor:
    """The norm of the sum as it was first written: ``[B]^N x D`` numbers, then a norm over the last axis."""
    total = sum(rows_of(xs))
    assert isinstance(total, Tensor)
    return full_cross_entropy(scale * total.square().sum(-1).sqrt())


def half_products(xs: Sequence[Tensor]) -> Tensor:
    """``[B]^N`` products over all modalities by one matrix product of the two halves' products."""
    b, n = xs[0].shape[0], len(xs)
    sides = []
    for half in (xs[: n // 2], xs[n // 2 :]):
        side = half[0]
        for x in half[1:]:
            side = (side[:, None] * x[None]).flatten(0, 1)
        sides.append(side)
    return (sides[0] @ sides[1].T).view([b] * n)


def product_materialised(xs: Sequence[Tensor], scale: float) -> Tensor:
    return full_cross_entropy(scale * half_products(xs))


def symile(xs: Sequence[Tensor], scale: float) -> Tensor:
    """Symile with all negatives, from its published formula: a pass per anchor, the others rolled."""
    b, n = xs[0].shape[0], len(xs)
    losses = []
    for m in range(n):
        others = [x for k, x in enumerate(xs) if k != m]
        blocks = [others[0]]
        for x in others[1:]:
            rolled = [x.roll(-shift, 0) for shift in range(b)]
            blocks = [product * turned for product in blocks for turned in rolled]
        logits = scale * xs[m] @ torch.cat(blocks).T  # the first block is the one without rolling: the positives
        losses.append(F.cross_entropy(logits, torch.arange(b)))
    return torch.stack(losses).mean()


def grams(xs: Sequence[Tensor]) -> Tensor:
    """``[B]^N`` sums of the inner products of all pairs, without D in the large tensor."""
    b, n = xs[0].shape[0], len(xs)
    total = torch.zeros([1] * n)
    for p, q in itertools.combinations(range(n), 2):
        shape = [b if k in (p, q) else 1 for k in range(n)]
        total = total + (xs[p] @ xs[q].T).view(shape)
    return total


def paircos_materialised(xs: Sequence[Tensor], scale: float) -> Tensor:
    n = len(xs)
    return full_cross_entropy(scale * 2.0 / (n * (n - 1)) * grams(xs))


def norm_materialised(xs: Sequence[Tensor], scale: float) -> Tensor:
    return full_cross_entropy(scale * (len(xs) + 2 * grams(xs)).sqrt())


def original_default(xs: Sequence[Tensor], scale: float) -> Tensor:
    """The default six-way loss, with the norm of the sum as similarity: kind to it, the width is not in the tensor."""
    return one_axis_cross_entropy(scale * (len(xs) + 2 * grams(xs)).sqrt())


def clip_cross_entropy(xs: Sequence[Tensor], scale: float) -> Tensor:
    """Two modalities, as everybody writes it."""
    logits, own = scale * xs[0] @ xs[1].T, torch.arange(len(xs[0]))
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def ours(similarity: str, objective: str, backend: str = "auto") -> Way:
    """A backend of trimtab; the rows are normalised before, as for all ways."""

    def run(xs: Sequence[Tensor], scale: float) -> Tensor:
        from trimtab.losses import nway_loss

        loss: Tensor = nway_loss(
            xs,
            similarity=similarity,
            objective=objective,
            logit_scale=scale,
            normalize=None,
            backend=backend,
            budget_bytes=1 << 40,
            budget_s=1e9,
        )
        return loss

    return run


def each(k: float, *, width: bool = True) -> Count:
    """``k`` per tuple, or per tuple and width."""
    return lambda b, n, d: k * b**n * (d if width else 1)


def entries() -> list[Entry]:
    """All rows, peers before ours within a problem: the first one that ran is what the others are compared with."""
    tensor = each(36.0, width=False)  # of bytes: logits, their gradient, and what N cross-entropies keep
    mip, norm, paircos, axis = "mip full", "norm full", "paircos full", "norm axis"
    hand, original = "by hand: ", "by hand, as first published: "
    return [
        Entry(mip, hand + "[B]^N by a matmul of half products", product_materialised, each(6), tensor),
        Entry(mip, hand + "Symile's formula, all negatives", symile, symile_flops, symile_bytes),
        Entry(mip, "trimtab materialize", ours("mip", "full", "materialize"), each(6)),
        Entry(mip, "trimtab stream", ours("mip", "full", "stream"), each(8)),
        Entry(norm, original + "[B]^N x D", norm_with_width, each(8), each(13)),
        Entry(norm, hand + "[B]^N from Gram matrices", norm_materialised, None, tensor),
        Entry(norm, "trimtab stream", ours("norm", "full", "stream"), each(8)),
        Entry(norm, "trimtab gram", ours("norm", "full", "gram")),
        Entry(paircos, hand + "[B]^N from Gram matrices", paircos_materialised, None, tensor),
        Entry(paircos, "trimtab gram", ours("paircos", "full", "gram")),
        Entry(paircos, "trimtab contract", ours("paircos", "full", "contract"), each(12, width=False)),
        Entry(axis, original + "cross-entropy on [B]^N", original_default, None, tensor),
        Entry(axis, "trimtab axis", ours("norm", "axis"), lambda b, n, d: 6.0 * n * b**2 * d),
        Entry(CLIP, hand + "F.cross_entropy twice", clip_cross_entropy, each(6), each(24, width=False)),
        Entry(CLIP, "trimtab auto", ours("mip", "full"), each(8)),
        Entry(CLIP, "trimtab stream", ours("mip", "full", "stream"), each(8)),
    ]


def symile_flops(b: int, n: int, d: int) -> float:
    return 6.0 * n * b**n * d


def symile_bytes(b: int, n: int, d: int) -> float:
    return 4.0 * (n + 2) * b ** (n - 1) * d + 36.0 * b**n
