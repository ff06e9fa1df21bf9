"""The N-way losses by definition: every logit of every tuple, float64, no eps, no tricks. Small sizes only."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import softplus


def rows(xs: Sequence[Tensor]) -> list[Tensor]:
    """The N vectors of every tuple, shaped ``[B, .., B, D]`` by broadcasting."""
    n, (b, d) = len(xs), xs[0].shape
    return [x.reshape([1] * m + [b] + [1] * (n - 1 - m) + [d]).expand([b] * n + [d]) for m, x in enumerate(xs)]


def similarity(xs: Sequence[Tensor], name: str) -> Tensor:
    """``s[t]`` for all tuples, from the definitions of the table."""
    v = rows(xs)
    n = len(v)
    total = torch.stack(v).sum(0)
    if name == "mip":
        product = v[0]
        for u in v[1:]:
            product = product * u
        return product.sum(-1)
    if name == "norm":
        return total.square().sum(-1).sqrt()
    if name == "sqnorm":
        return total.square().sum(-1)
    if name == "paircos":
        unit = [u / u.norm(dim=-1, keepdim=True) for u in v]
        return sum((p * q).sum(-1) for p, q in itertools.combinations(unit, 2)) * (2.0 / (n * (n - 1)))
    mean = total / n
    if name == "dist2":
        return -sum((u - mean).square().sum(-1) for u in v) / n
    if name == "dist":
        return -sum((u - mean).square().sum(-1).sqrt() for u in v) / n
    if name == "cosmean":
        product = torch.ones(v[0].shape[:-1], dtype=v[0].dtype)
        for u in v:
            product = product * (u * total).sum(-1) / (u.norm(dim=-1) * total.norm(dim=-1))
        return product.sign() * product.abs() ** (1.0 / n)
    if name == "volume":
        stacked = torch.stack(v, -2)
        return -torch.linalg.det(stacked @ stacked.mT).clamp_min(0).sqrt()
    raise ValueError(name)


def normalise(x: Tensor, how: str | None) -> Tensor:
    """Rows of length 1 (l2), of root mean square 1 (rms), or as they are."""
    if how is None:
        return x
    unit = x / x.norm(dim=-1, keepdim=True)
    return unit if how == "l2" else unit * x.shape[-1] ** 0.5


def logits(xs: Sequence[Tensor], name: str, scale: float | Tensor = 1.0, how: str | None = None) -> Tensor:
    """``z[t]``; under rms the multilinear product is a mean over the width instead of a sum."""
    s = similarity([normalise(x, how) for x in xs], name)
    if name == "mip" and how == "rms":
        s = s / xs[0].shape[-1]
    return scale * s


def diagonal(z: Tensor) -> Tensor:
    """The positives ``z[i, .., i]``."""
    i = torch.arange(z.shape[0])
    return z[(i,) * z.dim()]


def anchors(z: Tensor, m: int, objective: str) -> Tensor:
    """``[B, K]``: all candidates of anchor ``(m, i)``, the positive among them."""
    n, b = z.dim(), z.shape[0]
    if objective == "full":
        return z.movedim(m, 0).reshape(b, -1)
    i = torch.arange(b)[:, None].expand(b, b)
    j = i.T
    if objective == "axis":
        return z[tuple(j if k == m else i for k in range(n))]
    if objective == "joint":
        return z[tuple(i if k == m else j for k in range(n))]
    raise ValueError(objective)


def loss(
    xs: Sequence[Tensor],
    name: str,
    objective: str,
    scale: float | Tensor = 1.0,
    how: str | None = None,
    *,
    bias: float | Tensor = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """The scalar by definition (axis, joint, full, pairwise, sigmoid)."""
    if objective == "pairwise":
        return sum(
            loss([p, q], name, "full", scale, how, smoothing=smoothing) for p, q in itertools.combinations(xs, 2)
        )
    z = logits(xs, name, scale, how)
    n, b = z.dim(), z.shape[0]
    if objective == "sigmoid":
        y = -torch.ones_like(z)
        i = torch.arange(b)
        y[(i,) * n] = 1.0
        return softplus(-y * (z + bias)).sum() / b
    positive = diagonal(z)
    total = torch.zeros((), dtype=z.dtype)
    for m in range(n):
        candidates = anchors(z, m, objective)
        lse = torch.logsumexp(candidates, 1)
        total = total + (lse - (1 - smoothing) * positive - smoothing * candidates.mean(1)).sum()
    return total / (n * b)
