"""Activations, gradient noise and stabilisers under the documented names."""

from __future__ import annotations

import math
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

SCALED_TANH_SLOPE = 2.0 / 3.0
"""With the factor 1.7159 it maps 1 to 1 and -1 to -1, and its curvature is largest there (LeCun et al., 1998)."""


class ImprovedActivations:
    """Six activation functions, each a plain function of a tensor: use them as they are, without an instance.

    Example:
        >>> import torch
        >>> from trimtab.compat.nn import ImprovedActivations
        >>> x = torch.tensor([-3.0, 0.0, 3.0])
        >>> [round(v, 3) for v in ImprovedActivations.swish(x).tolist()]
        [-0.142, 0.0, 2.858]
        >>> float(ImprovedActivations.scaled_tanh(torch.tensor(1.0))) - 1.0 < 1e-4
        True
    """

    @staticmethod
    def gelu(x: Tensor) -> Tensor:
        """``x * Phi(x)``, with the exact normal distribution function: what transformers are usually built with."""
        return functional.gelu(x)

    @staticmethod
    def swish(x: Tensor, beta: float | Tensor = 1.0) -> Tensor:
        """``x * sigmoid(beta * x)``; SiLU for ``beta=1``, nearer to ReLU the larger `beta`, which may be learned."""
        if isinstance(beta, Tensor):
            return x * torch.sigmoid(beta * x)
        return functional.silu(x) if beta == 1.0 else x * torch.sigmoid(beta * x)

    @staticmethod
    def mish(x: Tensor) -> Tensor:
        """``x * tanh(log(1 + exp(x)))``: as swish, a little steeper near zero and dearer."""
        return functional.mish(x)

    @staticmethod
    def leaky_relu(x: Tensor, negative_slope: float = 0.01) -> Tensor:
        """`x` above zero, ``negative_slope * x`` below: the cheapest that never dies."""
        return functional.leaky_relu(x, negative_slope)

    @staticmethod
    def elu(x: Tensor, alpha: float = 1.0) -> Tensor:
        """`x` above zero, ``alpha * (exp(x) - 1)`` below: its mean stays nearer to zero than ReLU's."""
        return functional.elu(x, alpha)

    @staticmethod
    def scaled_tanh(x: Tensor, scale: float = 1.7159, slope: float = SCALED_TANH_SLOPE) -> Tensor:
        """``scale * tanh(slope * x)``: LeCun's tanh, whose variance stays near 1 from layer to layer.

        Differs from the documented original, which has the factor but not the slope that belongs to it (``slope=1``).
        """
        return scale * torch.tanh(slope * x)


_STEPS: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The step of each model, as long as the model lives."""


def add_gradient_noise(
    model: nn.Module,
    noise_std: float = 1e-5,
    gamma: float = 0.55,
    step: int | None = None,
    generator: torch.Generator | None = None,
) -> float:
    """Add normal noise of ``noise_std / (1 + step) ** gamma`` to every gradient; returns that standard deviation.

    Call it between the backward pass and the optimizer's step. Without `step` each model counts its own calls, from 0;
    with it, the count continues from there. Frozen parameters, those without a gradient and sparse gradients are left
    alone. With a `generator` the global random state is not touched; on several ranks give every rank one with the
    same seed, or the replicas drift apart. (Neelakantan et al., 2015, anneal the variance: their exponent is twice
    this one.)

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from trimtab.compat.nn import add_gradient_noise
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


METHODS = ("layer_norm", "batch_norm", "weight_norm", "spectral_norm")


class GradientStabilizer(nn.Module):
    """Keeps the scale of ``[..., hidden_dim]`` features, and with it that of their gradients.

    - `layer_norm`: each row to mean 0 and variance 1; `batch_norm`: each feature over all rows, with running statistics
      (`momentum`) in eval mode and for a single row, which has no variance.
    - `weight_norm`, `spectral_norm`: a square linear layer, the identity at first, whose rows have a learned length, or
      whose largest singular value is held at 1: no signal and no gradient grows in it.

    Differs from the documented original: there the last two returned their input unchanged; here they act. To put them
    on a layer that exists, use `stabilize_layer`.

    Example:
        >>> import torch
        >>> from trimtab.compat.nn import GradientStabilizer
        >>> layer = GradientStabilizer("layer_norm", hidden_dim=4)
        >>> [round(v, 2) for v in layer(torch.tensor([[1e6, 2e6, 3e6, 4e6]]))[0].tolist()]
        [-1.34, -0.45, 0.45, 1.34]
    """

    def __init__(
        self, method: str = "layer_norm", hidden_dim: int | None = None, eps: float = 1e-5, momentum: float = 0.1
    ) -> None:
        if method not in METHODS:
            raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
        if hidden_dim is None or hidden_dim < 1:
            raise ValueError(f"hidden_dim is {hidden_dim}; expected the size of the last dimension, 1 or more")
        super().__init__()
        self.method = method
        self.hidden_dim = hidden_dim
        self.layer: nn.Module
        if method == "layer_norm":
            self.layer = nn.LayerNorm(hidden_dim, eps=eps)
        elif method == "batch_norm":
            self.layer = nn.BatchNorm1d(hidden_dim, eps=eps, momentum=momentum)
        else:
            square = nn.Linear(hidden_dim, hidden_dim)
            with torch.no_grad():
                square.weight.copy_(torch.eye(hidden_dim))
                square.bias.zero_()
            self.layer = stabilize_layer(square, method, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        """The features at a stable scale, in the same shape."""
        if x.shape[-1:] != (self.hidden_dim,):
            raise ValueError(f"the input has the shape {tuple(x.shape)}; expected [..., {self.hidden_dim}]")
        if isinstance(self.layer, nn.BatchNorm1d):
            return _batch_norm(self.layer, x.reshape(-1, self.hidden_dim)).reshape(x.shape)
        out: Tensor = self.layer(x)
        return out

    def extra_repr(self) -> str:
        """The method."""
        return f"method={self.method!r}, hidden_dim={self.hidden_dim}"


def stabilize_layer(layer: nn.Module, method: str, eps: float = 1e-12) -> nn.Module:
    """Put `weight_norm` or `spectral_norm` on the weight of a layer, in place; returns the layer.

    Its output is as it was under `weight_norm`; under `spectral_norm` its weight is divided by its largest singular
    value. A row of zeros stays zero under `weight_norm` but can be learned. Undo it with
    `torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")`.

    Example:
        >>> layer = stabilize_layer(nn.Linear(8, 8), "spectral_norm")
        >>> for _ in range(50):
        ...     out = layer(torch.ones(1, 8))
        >>> round(float(torch.linalg.matrix_norm(layer.weight.detach(), 2)), 2)
        1.0
    """
    if method not in METHODS[2:]:
        raise ValueError(f"method is {method!r}; expected one of {', '.join(METHODS[2:])}")
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        raise ValueError(f"a {type(layer).__name__} has no weight of two dimensions or more to normalise")
    if parametrize.is_parametrized(layer, "weight"):
        raise ValueError(f"the weight of this {type(layer).__name__} is parametrised already; remove that first")
    if method == "weight_norm":
        parametrize.register_parametrization(layer, "weight", _LengthAndDirection(eps))
    elif not bool(weight.detach().any()):
        raise ValueError("a weight of zeros alone has no largest singular value; initialise the layer first")
    else:
        parametrizations.spectral_norm(layer, eps=eps)
    return layer


class _LengthAndDirection(nn.Module):
    """``weight = length * direction / |direction|`` per row; torch's own gives NaN for a row of zeros."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, length: Tensor, direction: Tensor) -> Tensor:
        return direction * (length / _row_norm(direction).clamp_min(self.eps))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        length = _row_norm(weight)
        return length, torch.where(length > 0, weight, torch.ones_like(weight))


def _row_norm(weight: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.dim())), keepdim=True)
    return norm


def _batch_norm(layer: nn.BatchNorm1d, rows: Tensor) -> Tensor:
    """As the layer does it; a single row, at which torch raises in train mode, is normalised as in eval mode."""
    if layer.training and rows.shape[0] == 1:
        return functional.batch_norm(
            rows, layer.running_mean, layer.running_var, layer.weight, layer.bias, False, 0.0, layer.eps
        )
    out: Tensor = layer(rows)
    return out
