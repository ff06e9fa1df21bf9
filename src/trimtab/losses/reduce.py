"""Candidates to one number per anchor, with what is not a candidate left out exactly."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from trimtab.losses.problem import Kind

__all__ = ["candidates", "empty", "log1pexp", "lse", "reduce_all"]


def empty(kind: Kind) -> float:
    """The reduction over no tuples at all."""
    return -torch.inf if kind == "lse" else 0.0


def log1pexp(x: Tensor) -> Tensor:
    """``log(1 + exp(x))`` to full relative precision at both ends (``F.softplus`` cuts off at 20)."""
    return torch.logaddexp(x, torch.zeros((), dtype=x.dtype, device=x.device))


class _Lse(torch.autograd.Function):
    """log-sum-exp whose gradient is 0, not NaN, where there is nothing to sum."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, dim: int) -> Tensor:
        top = z.amax(dim, keepdim=True)
        top = top.masked_fill(top == -torch.inf, 0.0)
        out = (z - top).exp_().sum(dim, keepdim=True).log_().add_(top)
        ctx.save_for_backward(z, out)
        return out.squeeze(dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
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
