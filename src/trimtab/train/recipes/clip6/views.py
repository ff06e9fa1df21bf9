"""Six aligned modalities to learn from: emoji with their names in five languages, or six maps of one latent vector.

Held out are the emoji that `load_emoji` marks, by a hash of each. There are no skin tones among them, and no two are
drawn alike, but a man, a woman and a person who do the same differ in little else. So what shares the family of a
held-out emoji is left out of the training as well: the same thing with another gender or facing the other way, and any
family where one is held out. Flags, clocks and keycaps are different things that look alike; they stay on both sides.

Names become numbers in one space for all languages: see `train/text_features.py`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import LANGUAGES, load_emoji
from trimtab.train.text_features import name_features

NUM_VIEWS = 6
_LATENT, _SEEN, _NOISE = 8, 24, 0.3
_NUM_TRAIN, _NUM_HELD = 4096, 128
_NEITHER = re.compile("\N{VARIATION SELECTOR-16}|\N{ZERO WIDTH JOINER}[♀♂➡]")
_ADULT, _CHILD = re.compile("[👨👩🧑]"), re.compile("[👦👧🧒]")
_PEOPLE = re.compile("[👨👩🧑👦👧🧒]")


@dataclass(frozen=True, slots=True, kw_only=True)
class SixViews:
    """Row i of every tensor is the same thing, seen in another way."""

    names: tuple[str, ...]
    train: tuple[Tensor, ...]
    held: tuple[Tensor, ...]


@cache
def emoji_views(width: int) -> SixViews:
    """Pictures `[n, 3, 24, 24]` from -0.5 to 0.5, and the features of their names in five languages, `[n, width]`.

    It is made once and shared: copy what is to be changed.
    """
    emoji = load_emoji()
    held = torch.from_numpy(emoji.held_out)
    families = [family(character) for character in emoji.characters]
    away = {name for name, out in zip(families, held.tolist(), strict=True) if out}
    learn = torch.tensor([name not in away for name in families])
    pictures = torch.from_numpy(emoji.images).permute(0, 3, 1, 2).float() / 255 - 0.5
    names = name_features([emoji.names[language] for language in LANGUAGES], learn.tolist(), width)
    views = (pictures.contiguous(), *names)
    return SixViews(
        names=("image", *LANGUAGES),
        train=tuple(view[learn] for view in views),
        held=tuple(view[held] for view in views),
    )


def family(character: str) -> str:
    """What an emoji has in common with its near twins.

    Example:
        >>> family("🏃‍♀️‍➡️") == family("🏃"), family("👩‍🚀") == family("👨‍🚀"), family("🚀") == family("🧑‍🚀")
        (True, True, False)
    """
    plain = _CHILD.sub("🧒", _ADULT.sub("🧑", _NEITHER.sub("", character)))
    parts = plain.split("\N{ZERO WIDTH JOINER}")
    # Parents and children come in every arrangement, and all of them look like a family.
    return "🧑🧒" if len(parts) > 1 and all(_PEOPLE.fullmatch(part) for part in parts) else plain


def latent_views(seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """A latent vector of 8 numbers through six fixed random maps, `tanh(z W) + 0.3 noise`: training and held out.

    Example:
        >>> train, held = latent_views(0)
        >>> len(train), train[0].shape, held[5].shape
        (6, torch.Size([4096, 24]), torch.Size([128, 24]))
    """
    draw = torch.Generator().manual_seed(1000 + seed)
    z = torch.randn(_NUM_TRAIN + _NUM_HELD, _LATENT, generator=draw)
    views = []
    for _ in range(NUM_VIEWS):
        seen = torch.tanh(z @ torch.randn(_LATENT, _SEEN, generator=draw))
        views.append(seen + _NOISE * torch.randn(seen.shape, generator=draw))
    return [v[:_NUM_TRAIN] for v in views], [v[_NUM_TRAIN:] for v in views]


def generated_views(seed: int) -> SixViews:
    """`latent_views` under their names."""
    train, held = latent_views(seed)
    names = tuple(f"view{m + 1}" for m in range(NUM_VIEWS))
    return SixViews(names=names, train=tuple(train), held=tuple(held))


def make_loader(views: Sequence[Tensor], batch_size: int, seed: int | None = None) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of aligned rows, one tensor for each view: shuffled and of equal size with a seed, else as they come."""
    order = None if seed is None else torch.Generator().manual_seed(seed)
    rows = TensorDataset(*views)
    shuffled = order is not None
    return DataLoader(rows, batch_size=batch_size, shuffle=shuffled, drop_last=shuffled, generator=order)
