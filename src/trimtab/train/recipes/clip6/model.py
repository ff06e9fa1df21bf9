"""One tower per modality with its criterion; and the loss that six-way training started with, as the control."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from string import ascii_lowercase

import torch
from torch import Tensor, nn
from torch.nn import functional

SHIFT = 2
POOLED = 3
"""The side of what is left of a picture before the linear layer."""
LARGEST_FACTOR = 8
CONTRAST, BRIGHTNESS = 0.2, 0.05


class SixTowers(nn.Module):
    """Encodes a batch of N modalities, one tensor each, as N tensors `[B, width]`.

    The criterion belongs to it so that its scale is learnt, saved and guarded with everything else.
    """

    def __init__(self, towers: Sequence[nn.Module], criterion: nn.Module) -> None:
        super().__init__()
        self.towers = nn.ModuleList(towers)
        self.criterion = criterion

    def forward(self, views: Sequence[Tensor], present: Tensor | None = None) -> list[Tensor]:
        """The encodings, in the order of the views; zero where `present` `[B, N]` says that there is nothing."""
        if present is None:
            return [tower(view) for tower, view in zip(self.towers, views, strict=True)]
        found = [
            _encoded(tower, view, present[:, i]) for i, (tower, view) in enumerate(zip(self.towers, views, strict=True))
        ]
        like = next(one for one in found if one is not None)  # every sample has two modalities or more
        return [torch.zeros_like(like) if one is None else one for one in found]


def _encoded(tower: nn.Module, view: Tensor, there: Tensor) -> Tensor | None:
    """A tower sees only what is there: zeros in between would change what its normalisations learn."""
    if bool(there.all()):
        whole: Tensor = tower(view)
        return whole
    if not bool(there.any()):
        return None
    found = tower(view[there])
    return torch.zeros(len(view), found.shape[1], dtype=found.dtype, device=view.device).index_put((there,), found)


def own_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The criterion of a `SixTowers` on a batch by names, with `present` `[B, N]` if some may be missing."""
    assert isinstance(model, SixTowers)
    there = batch.get("present")
    xs = model([view for name, view in batch.items() if name != "present"], there)
    loss: Tensor = model.criterion(xs) if there is None else model.criterion(xs, mask=there.T)
    return loss


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


def image_tower(width: int, *, channels: int, dropout: float, planes: int = 3, side: int = 24) -> nn.Module:
    """Convolutions, each followed by a halving, down to 3 x 3; and one linear layer. Of 24 x 24 there are four."""
    halvings = max(int(math.log2(side / POOLED)), 1)
    sizes = (planes, *(min(2**i, LARGEST_FACTOR) * channels for i in range(halvings)))
    layers: list[nn.Module] = [Jitter()]
    for wide, wider in pairwise(sizes):
        layers += [*_convolution(wide, wider), nn.MaxPool2d(2)]
    layers += _convolution(sizes[-1], sizes[-1])
    if side != POOLED * 2**halvings:
        layers.append(nn.AdaptiveAvgPool2d(POOLED))
    layers += [nn.Flatten(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(POOLED**2 * sizes[-1], width))


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


def series_tower(channels: int, width: int) -> nn.Module:
    """Three convolutions over time, each leaving every fourth place; means of 8 parts of what is left; a linear map."""
    layers: list[nn.Module] = []
    for wide, wider in pairwise((channels, 32, 64, 128)):
        layers += [nn.Conv1d(wide, wider, 9, stride=4, padding=4), nn.GroupNorm(8, wider), nn.GELU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(8), nn.Flatten(), nn.Linear(8 * 128, width))


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
