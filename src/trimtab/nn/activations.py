"""Activation functions that let a gradient through where ReLU and Tanh do not."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

SCALED_TANH_SLOPE = 2.0 / 3.0
"""With the factor 1.7159 it maps 1 to 1 and -1 to -1, and its curvature is largest there (LeCun et al., 1998)."""


class ImprovedActivations:
    """Six activation functions, each a plain function of a tensor: use them as they are, without an instance.

    Example:
        >>> import torch
        >>> from trimtab.nn import ImprovedActivations
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
