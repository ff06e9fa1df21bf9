"""One tower per modality with its criterion; and the loss that six-way training started with, as the control."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from string import ascii_lowercase

import torch
from torch import Tensor, nn
from torch.nn import functional

SHIFT = 2
CONTRAST, BRIGHTNESS = 0.2, 0.05


class SixTowers(nn.Module):
    """Encodes a batch of N modalities, one tensor each, as N tensors `[B, width]`.

    The criterion belongs to it so that its scale is learnt, saved and guarded with everything else.
    """

    def __init__(self, towers: Sequence[nn.Module], criterion: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)
        self.criterion = criterion

    def forward(self, views: Sequence[Tensor]) -> list[Tensor]:
        """The encodings, in the order of the views."""
        return [tower(view) for tower, view in zip(self.towers, views, strict=True)]


def contrastive_loss(model: nn.Module, views: Sequence[Tensor]) -> Tensor:
    """The criterion of a `SixTowers` on its own encodings."""
    assert isinstance(model, SixTowers)
    loss: Tensor = model.criterion(model(views))
    return loss


class Jitter(nn.Module):
    """In training, shifts a batch of pictures by a pixel or two and changes the colours of each a little."""

    def forward(self, x: Tensor) -> Tensor:
        """The pictures as another camera might have taken them."""
        if not self.training:
            return x
        down, right = torch.randint(-SHIFT, SHIFT + 1, (2,)).tolist()
        x = torch.roll(x, (down, right), (2, 3))  # the ground is the same on every side
        noise = torch.randn(2, len(x), x.shape[1], 1, 1, device=x.device)
        return x * (1 + CONTRAST * noise[0]) + BRIGHTNESS * noise[1]


def image_tower(width: int, *, channels: int, dropout: float) -> nn.Module:
    """Four convolutions from 24 x 24 down to 3 x 3, and one linear layer."""
    sizes = (3, channels, 2 * channels, 4 * channels)
    layers: list[nn.Module] = [Jitter()]
    for wide, wider in pairwise(sizes):
        layers += [*_convolution(wide, wider), nn.MaxPool2d(2)]
    layers += [*_convolution(sizes[-1], sizes[-1]), nn.Flatten(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(9 * sizes[-1], width))


def _convolution(wide: int, wider: int) -> list[nn.Module]:
    return [nn.Conv2d(wide, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.GELU()]


def text_tower(features: int, width: int, *, dropout: float) -> nn.Module:
    """One linear map without an offset: a name without a letter is a row of zeros, and stays one.

    Dropout of most features takes pieces of words away, so that no name is learnt by one of them; a deeper tower only
    learns the training names by heart.
    """
    return nn.Sequential(nn.Dropout(dropout), nn.Linear(features, width, bias=False))


def vector_tower(features: int, width: int) -> nn.Module:
    """The encoder of a generated view."""
    return nn.Sequential(nn.Linear(features, 64), nn.GELU(), nn.Linear(64, width))


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
