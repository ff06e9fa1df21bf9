"""What a backend must give back, from the logits of the definition: every negative of every anchor, float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.losses import reference
from trimtab.losses.problem import Kind, Problem


def reduced(z: Tensor, kind: Kind, *, bias: Tensor | float = 0.0, present: Tensor | None = None) -> Tensor:
    """``[N, B]`` from all logits, positives and tuples with an absent entry left out."""
    n, b = z.dim(), z.shape[0]
    exists = torch.ones_like(z, dtype=torch.bool)
    i = torch.arange(b)
    exists[(i,) * n] = False
    if present is not None:
        for m in range(n):
            exists &= present[m].reshape([b if k == m else 1 for k in range(n)])
    rows = []
    for m in range(n):
        there = exists.movedim(m, 0).reshape(b, -1)
        values = z.movedim(m, 0).reshape(b, -1)
        if kind == "lse":
            some = there.any(1)
            safe = torch.where(there | ~some[:, None], values, -math.inf)
            rows.append(torch.where(some, torch.logsumexp(safe, 1), -math.inf))
        else:
            terms = values if kind == "sum" else torch.logaddexp(values + bias, torch.zeros_like(values))
            rows.append(torch.where(there, terms, 0.0).sum(1))
    return torch.stack(rows)


def inputs(n: int, b: int, d: int, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Rows of length about 1 that agree in part, so that no similarity is flat."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(b, d, generator=generator, dtype=torch.float64)
    rows = (common + torch.randn(b, d, generator=generator, dtype=torch.float64) for _ in range(n))
    return tuple((x / (2 * d) ** 0.5).to(dtype).requires_grad_() for x in rows)


def cotangent(n: int, b: int, *, seed: int = 7) -> Tensor:
    """Of both signs."""
    return torch.randn(n, b, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradients(value: Tensor, g: Tensor, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Of ``sum(g * value)``, where anchors without tuples do not count."""
    alive = value != -math.inf
    total = torch.where(alive, value, 0.0) * g.to(value.dtype)
    found = torch.autograd.grad(total.sum(), leaves, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(x) if f is None else f for x, f in zip(leaves, found, strict=True)]


def compare(
    backend: Callable[[Problem, Kind], Tensor],
    xs: Sequence[Tensor],
    similarity: str,
    kind: Kind,
    *,
    scale: float = 3.0,
    bias: float = -0.5,
    present: Tensor | None = None,
    chunk: int | None = None,
    tolerance: float = 1e-9,
) -> None:
    """Value and every gradient of a backend against the definition."""
    dtype = xs[0].dtype
    factor = torch.tensor(scale, dtype=dtype, requires_grad=True)
    offset = torch.tensor(bias, dtype=dtype, requires_grad=True)
    rows = tuple(unit(x) for x in xs) if similarity == "paircos" else tuple(xs)
    problem = Problem(xs=rows, similarity=similarity, scale=factor, bias=offset, present=present, chunk=chunk)
    value = backend(problem, kind)
    leaves = [*xs, factor, offset]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = reduced(wide[-2] * reference.similarity(wide[:-2], similarity), kind, bias=wide[-1], present=present)
    n, b = expected.shape
    g = cotangent(n, b)
    close(value, expected, tolerance)
    for mine, theirs in zip(gradients(value, g, leaves), gradients(expected, g, wide), strict=True):
        close(mine, theirs, tolerance)


def unit(x: Tensor) -> Tensor:
    """Rows of length 1, and zero rows, as a problem has them for cosines."""
    length = x.norm(dim=-1, keepdim=True)
    return x / torch.where(length == 0, 1.0, length)


def close(mine: Tensor, expected: Tensor, tolerance: float) -> None:
    """Relative to the largest entry; infinities where they belong."""
    mine, expected = mine.detach().double(), expected.detach()
    dead = torch.isinf(expected)
    assert torch.equal(torch.isinf(mine), dead)
    mine, expected = torch.where(dead, 0.0, mine), torch.where(dead, 0.0, expected)
    error = (mine - expected).abs().max() / expected.abs().max().clamp_min(1.0)
    assert error <= tolerance, float(error)
