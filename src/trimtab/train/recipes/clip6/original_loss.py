"""What six-way training started with: the loss of 6DIMCOCO by its formula, as the control that does not learn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from string import ascii_lowercase

import torch
from torch import Tensor, nn
from torch.nn import functional

LOG_SCALE = math.log(1 / 0.07)
LARGEST_BATCH = 12
"""Of six modalities: 12^6 logits, labels and six cross-entropies of them are half a gigabyte, 16^6 are three."""


def version_zero(xs: Sequence[Tensor], scale: Tensor) -> Tensor:
    """Every one of the B^N products of unit vectors, a label at (i, .., i), one cross-entropy per axis.

    Nothing keeps the product of six unit vectors of width 64 from being about 1e-3, or a row of zeros from being NaN.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> equal = [torch.randn(4, 64)] * 6
        >>> f"{version_zero(equal, torch.tensor(1 / 0.07)):.2f}, by chance {math.log(4):.2f}"
        '1.35, by chance 1.39'
    """
    units = [x / x.norm(dim=-1, keepdim=True) for x in xs]
    b, n = len(units[0]), len(units)
    axes = ascii_lowercase[:n]
    logits = scale * torch.einsum(f"{','.join(f'{axis}z' for axis in axes)}->{axes}", *units)
    labels = torch.zeros_like(logits)
    labels[(torch.arange(b),) * n] = 1.0
    turns = [[(r + k) % n for k in range(n)] for r in range(n)]
    losses = [functional.cross_entropy(logits.permute(turn), labels, reduction="sum") for turn in turns]
    return torch.stack(losses).mean() / b


class OriginalLoss(nn.Module):
    """`version_zero` with the learned scale of the original, which nothing bounds."""

    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.tensor(LOG_SCALE))

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        """The loss of N modalities `[B, D]`."""
        return version_zero(xs, self.logit_scale.exp())
