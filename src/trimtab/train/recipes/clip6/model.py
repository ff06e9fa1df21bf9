"""One tower per modality, all ending in the same space, and the criterion with its learned scale."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

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
