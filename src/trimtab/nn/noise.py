"""Noise on gradients that fades with the steps: it can carry a deep network out of a poor start."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_STEPS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The step each model has come to; a model that is gone takes its counter with it."""


def add_gradient_noise(
    model: nn.Module,
    noise_std: float = 1e-5,
    gamma: float = 0.55,
    step: int | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Add normal noise of ``noise_std / (1 + step) ** gamma`` to every gradient; returns that standard deviation.

    Call it between the backward pass and the optimizer's step. Without `step` each model counts its own calls, from 0;
    with it, the count goes on from there. Frozen parameters, those without a gradient and sparse gradients are left
    alone. With a `generator` the global random state is not touched; on several ranks give every rank one with the
    same seed, or the replicas drift apart. (Neelakantan et al., 2015, anneal the variance: their exponent is twice
    this one.)

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from trimtab.nn import add_gradient_noise
        >>> model = nn.Linear(2, 1)
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> [round(add_gradient_noise(model, 0.1, gamma=1.0), 3) for _ in range(3)]
        [0.1, 0.05, 0.033]
    """
    if not (noise_std >= 0 and math.isfinite(noise_std)):
        raise ValueError(f"noise_std is {noise_std}; expected a finite number, 0 or more")
    if not (gamma >= 0 and math.isfinite(gamma)):
        raise ValueError(f"gamma is {gamma}; expected a finite number, 0 (no fading) or more")
    if step is not None and step < 0:
        raise ValueError(f"step is {step}; expected 0 or more")
    now = _STEPS.get(model, 0) if step is None else step
    _STEPS[model] = now + 1
    std = noise_std / math.pow(1.0 + now, gamma)
    if std > 0:
        for parameter in model.parameters():
            grad = parameter.grad
            if parameter.requires_grad and grad is not None and grad.layout == torch.strided:
                grad.add_(_noise_like(grad, generator), alpha=std)
    return std


def _noise_like(grad: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal values for this gradient, drawn where the generator lives."""
    if generator is None:
        return torch.randn_like(grad)
    drawn = torch.randn(grad.shape, dtype=grad.dtype, device=generator.device, generator=generator)
    return drawn.to(grad.device)
