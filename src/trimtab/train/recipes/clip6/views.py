"""Six aligned modalities to learn from: emoji with their names in five languages, or six maps of one latent vector.

Held out are the emoji that `load_emoji` marks, by a hash of each. There are no skin tones among them, and no two are
drawn alike, but a man, a woman and a person who do the same differ in little else. So what shares the family of a
held-out emoji is left out of the training as well: the same thing with another gender or facing the other way, and any
family where one is held out. Flags, clocks and keycaps are different things that look alike; they stay on both sides.

Names become numbers: pieces of their words, hashed and weighted by how rare they are, in one space for all languages.
"""

from __future__ import annotations

import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from trimtab.data import LANGUAGES, load_emoji

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


NUM_HASHES = 1 << 16
NUM_PLACES = 8
"""Each piece of a word is added at this many places of a row, with random signs: few share all of theirs."""
SHORTEST, LONGEST = 1, 3


def pieces(name: str) -> list[str]:
    """Each word with its bounds, and all its runs of 1 to 3 letters; accents and case do not count.

    Related languages share them: `radioactive` and `radiactivo` have most of their pieces in common.

    Example:
        >>> pieces("Épi")
        ['<epi>', '<', 'e', 'p', 'i', '>', '<e', 'ep', 'pi', 'i>', '<ep', 'epi', 'pi>']
    """
    letters = unicodedata.normalize("NFKD", name.lower().replace("ß", "ss"))
    words = "".join(c for c in letters if not unicodedata.combining(c)).replace("-", " ").split()
    found: dict[str, None] = {}
    for word in (f"<{word}>" for word in words):
        found[word] = None
        for size in range(SHORTEST, LONGEST + 1):
            found |= dict.fromkeys(word[i : i + size] for i in range(len(word) - size + 1))
    return list(found)


def name_features(languages: Sequence[Sequence[str]], learn: Sequence[bool], width: int) -> tuple[Tensor, ...]:
    """The names of each language as rows of root mean square 1, `[n, width]`; an empty name is a row of zeros.

    A row is the sum of one fixed random vector per piece, times the logarithm of how rare the piece is in the names to
    `learn` from: nothing of the others is looked at.

    Example:
        >>> names = [["radioactive", "apple", ""], ["radiactivo", "manzana", "ancla"]]
        >>> english, spanish = name_features(names, [True, True, True], 512)
        >>> (english[0] @ spanish.T).argmax().item(), english[2].norm().item()
        (0, 0.0)
    """
    split = [[pieces(name) for name in names] for names in languages]
    seen: Counter[str] = Counter()
    for rows in split:
        for row, known in zip(rows, learn, strict=True):
            seen.update(row if known else ())
    most = sum(learn) * len(languages) + 1
    draw = torch.Generator().manual_seed(0)
    places = torch.randint(width, (NUM_HASHES, NUM_PLACES), generator=draw)
    signs = 2.0 * torch.randint(2, (NUM_HASHES, NUM_PLACES), generator=draw) - 1.0

    def summed(rows: list[list[str]]) -> Tensor:
        found = [(i, piece) for i, row in enumerate(rows) for piece in row]
        hashes = torch.tensor([zlib.crc32(piece.encode("utf-8")) % NUM_HASHES for _, piece in found])
        weights = torch.tensor([math.log(most / (seen[piece] + 1)) for _, piece in found])
        at = torch.tensor([i for i, _ in found])[:, None] * width + places[hashes]
        sums = torch.zeros(len(rows) * width)
        sums.index_add_(0, at.flatten(), (weights[:, None] * signs[hashes]).flatten())
        return functional.normalize(sums.view(len(rows), width), dim=-1) * math.sqrt(width)

    return tuple(summed(rows) for rows in split)
