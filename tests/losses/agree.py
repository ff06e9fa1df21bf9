"""What the loss must be to all digits, small losses too, and inputs made to reach them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.losses import reference

NAMES = ("mip", "norm", "sqnorm", "paircos", "dist2", "dist", "cosmean", "volume")
SIZES = {2: 7, 3: 5, 4: 4, 5: 3, 6: 3}


def how(name: str) -> str:
    return "rms" if name == "mip" else "l2"


def rows(n: int, b: int, d: int = 9, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, d, generator=generator, dtype=dtype).requires_grad_() for _ in range(n)]


def aligned(n: int, b: int, d: int, noise: float, seed: int) -> list[Tensor]:
    """Modalities that say nearly the same of a sample; positive, so that products of three agree in sign."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(b, d, generator=generator, dtype=torch.float64)
    return [(base + noise * torch.randn(b, d, generator=generator, dtype=torch.float64)).abs() for _ in range(n)]


def excluded(xs: Sequence[Tensor], name: str, objective: str, scale: float | Tensor, normalise: str | None) -> Tensor:
    """`reference.loss` with the positive outside the log-sum-exp: the same number where both have digits left."""
    z = reference.logits(xs, name, scale, normalise)
    n, b = z.dim(), z.shape[0]
    i = torch.arange(b)
    others = z.index_put((i,) * n, torch.full((b,), -torch.inf, dtype=z.dtype))
    terms = [
        torch.logaddexp(
            torch.logsumexp(reference.anchors(others, m, objective), 1) - reference.diagonal(z), z.new_zeros(())
        )
        for m in range(n)
    ]
    return torch.stack(terms).mean()


def scale_for(loss: float, xs: Sequence[Tensor], name: str, objective: str) -> float:
    """The scale at which the loss is about ``loss`` (as near as 1e-4 .. 1e4 allows)."""
    low, high = 1e-4, 1e4
    for _ in range(20):
        middle = (low * high) ** 0.5
        if excluded(xs, name, objective, middle, how(name)) > loss:
            low = middle
        else:
            high = middle
    return high


def gradients(loss: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    found = torch.autograd.grad(loss, list(inputs), allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def distance(found: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Relative distance of two lists of tensors taken as one vector."""
    a, b = (torch.cat([t.double().flatten() for t in list_]) for list_ in (found, want))
    return float((a - b).norm() / b.norm().clamp_min(1e-300))
