"""Pairs of real images with a question about them: handwritten digits, emoji, or the user's own from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from trimtab.data import load_digits, load_emoji

ANSWERS = ("First", "Second", "Similar")
FIRST, SECOND, SIMILAR = range(3)
PAD = "<pad>"
ALIKE, APART = 0.2, 0.6
"""In standard deviations (in digits for digits): alike up to the one, different from the other on."""
HELD_OUT = 0.2
ROUNDS = 200

DIGIT_QUESTIONS = (
    ("which digit is larger", "digit", 1.0),
    ("which has more ink", "ink", 1.0),
    ("which is wider", "width", 1.0),
    ("which is narrower", "width", -1.0),
)
EMOJI_QUESTIONS = (
    ("which is brighter", "light", 1.0),
    ("which is redder", "red", 1.0),
    ("which is bluer", "red", -1.0),
    ("which covers more", "cover", 1.0),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """Images `[n, channels, height, width]` from 0 to 1, and which of them no training may see."""

    images: Tensor
    held_out: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Pairs of images by their numbers, the question about each as tokens, and the answer."""

    first: Tensor
    second: Tensor
    prompts: Tensor
    labels: Tensor


class PairSet(Dataset[dict[str, Tensor]]):
    """One pair with its question and answer at a time; holds each image once, however many pairs show it."""

    def __init__(self, images: Tensor, asked: Asked) -> None:
        self.images, self.asked = images, asked

    def __len__(self) -> int:
        return len(self.asked.labels)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        asked = self.asked
        return {
            "first": self.images[asked.first[i]],
            "second": self.images[asked.second[i]],
            "prompt": asked.prompts[i],
            "labels": asked.labels[i],
        }


def encode(questions: Sequence[str], words: Sequence[str]) -> Tensor:
    """Each question as the numbers of its words, filled up on the left: the last token is always its last word.

    Example:
        >>> words = vocabulary(["which is wider", "which digit is larger"])
        >>> encode(["which is wider", "which digit is larger"], words).tolist()
        [[0, 4, 2, 5], [4, 1, 2, 3]]
    """
    number = {word: i for i, word in enumerate(words)}
    rows = [[number[word] for word in text.split()] for text in questions]
    longest = max(map(len, rows))
    return torch.tensor([[0] * (longest - len(row)) + row for row in rows])


def vocabulary(questions: Sequence[str]) -> tuple[str, ...]:
    """Every word of the questions, in a fixed order, after the one that fills up."""
    return (PAD, *sorted({word for text in questions for word in text.split()}))


def digits(seed: int) -> tuple[Collection, dict[str, Tensor]]:
    """The handwritten digits, and what can be asked about each of them."""
    pixels, classes = load_digits()
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16.0
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    held = torch.zeros(len(images), dtype=torch.bool)
    held[order[: round(HELD_OUT * len(images))]] = True
    column = images[:, 0].sum(1)
    mass = column.sum(1)
    place = torch.arange(8.0)
    middle = (column * place).sum(1) / mass
    width = ((column * (place - middle[:, None]).square()).sum(1) / mass).sqrt()
    told = {"digit": torch.from_numpy(classes).float(), "ink": _scaled(mass), "width": _scaled(width)}
    return Collection(images=images, held_out=held), told


def emoji() -> tuple[Collection, dict[str, Tensor]]:
    """The emoji, and what can be asked about each of them."""
    shipped = load_emoji()
    images = torch.from_numpy(shipped.images).float().permute(0, 3, 1, 2) / 255.0
    light = images.mean((1, 2, 3))
    red = images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))
    cover = (images.amin(1) < 0.9).float().mean((1, 2))
    told = {"light": _scaled(light), "red": _scaled(red), "cover": _scaled(cover)}
    return Collection(images=images, held_out=torch.from_numpy(shipped.held_out)), told


def ask(
    questions: Sequence[tuple[str, str, float]],
    told: dict[str, Tensor],
    rows: Tensor,
    num: int,
    seed: int,
) -> Asked:
    """Draw pairs among `rows`, each question and each answer equally often, without those that are hard to call.

    Example:
        >>> told = {"size": torch.arange(50.0)}
        >>> asked = ask([("which is larger", "size", 1.0)], told, torch.arange(50), 30, seed=0)
        >>> bool((asked.first[asked.labels == FIRST] > asked.second[asked.labels == FIRST]).all())
        True
        >>> asked.labels.bincount().tolist()
        [10, 10]
    """
    generator = torch.Generator().manual_seed(seed)
    texts = [text for text, _, _ in questions]
    prompts = encode(texts, vocabulary(texts))
    share = max(num // (len(ANSWERS) * len(questions)), 1)
    found: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    for prompt, (_, name, sign) in zip(prompts, questions, strict=True):
        for label, (first, second) in enumerate(_drawn(sign * told[name], rows, share, generator)):
            many = len(first)
            found.append((first, second, prompt.expand(many, -1), torch.full((many,), label)))
    first, second, asked, labels = (torch.cat(column) for column in zip(*found, strict=True))
    order = torch.randperm(len(labels), generator=generator)
    return Asked(first=first[order], second=second[order], prompts=asked[order], labels=labels[order])


def _drawn(levels: Tensor, rows: Tensor, share: int, generator: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    """For each answer `share` pairs that have it, fewer where there are hardly any."""
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in ANSWERS]
    counts = [0] * len(ANSWERS)
    for _ in range(ROUNDS):
        first = rows[torch.randint(len(rows), (4 * share + 64,), generator=generator)]
        second = rows[torch.randint(len(rows), (4 * share + 64,), generator=generator)]
        answers = answer(levels[first] - levels[second])
        for label in range(len(ANSWERS)):
            mine = ((answers == label) & (first != second)).nonzero().flatten()[: share - counts[label]]
            counts[label] += len(mine)
            kept[label].append((first[mine], second[mine]))
        if min(counts) >= share:
            break
    return [(torch.cat([f for f, _ in some]), torch.cat([s for _, s in some])) for some in kept]


def answer(gap: Tensor) -> Tensor:
    """The answer to a difference between the first and the second; -1 where it is a matter of opinion."""
    clear = torch.where(gap > 0, FIRST, SECOND)
    doubtful = torch.where(gap.abs() <= ALIKE, SIMILAR, torch.full_like(clear, -1))
    return torch.where(gap.abs() >= APART, clear, doubtful)


def _scaled(values: Tensor) -> Any:
    return (values - values.mean()) / values.std()
