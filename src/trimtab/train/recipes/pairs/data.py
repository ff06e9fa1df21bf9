"""Pairs of real images with a question about them: handwritten digits, emoji, or the user's own from a file.

The user's own pairs come from an `.npz` file, read without pickles, each mistake in it named.
The file, `pairs.npz` in the folder or any `.npz` by its path, holds

- `images`: `[n, height, width]` or `[n, height, width, channels]`, whole numbers from 0 to 255, or floats;
- `pairs`: `[m, 2]`, the numbers of the first and the second image of each pair;
- `questions`: `[m]`, one text each, words with spaces between them;
- `labels`: `[m]`, 0 for First, 1 for Second, 2 for Similar;
- `held_out`, if you like: `[n]`, true for images that no training may see; else a fifth of them by the seed.

Pairs of a seen and a held-out image belong to neither part and are left out.
"""

from __future__ import annotations

import logging
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from trimtab.core.errors import InputError
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


class Images(Protocol):
    """Images `[channels, height, width]` by number: a tensor of all of them, or files that are read when needed."""

    @property
    def shape(self) -> Sequence[int]:
        """As that of the tensor of all of them."""
        ...

    def __getitem__(self, index: Tensor, /) -> Tensor:
        """One of them."""
        ...


class PairSet(Dataset[dict[str, Tensor]]):
    """One pair with its question and answer at a time; holds each image once, however many pairs show it."""

    def __init__(self, images: Images, asked: Asked) -> None:
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
    levels = {"digit": torch.from_numpy(classes).float(), "ink": _scaled(mass), "width": _scaled(width)}
    return Collection(images=images, held_out=held), levels


def emoji() -> tuple[Collection, dict[str, Tensor]]:
    """The emoji, and what can be asked about each of them."""
    shipped = load_emoji()
    images = torch.from_numpy(shipped.images).float().permute(0, 3, 1, 2) / 255.0
    light = images.mean((1, 2, 3))
    red = images[:, 0].mean((1, 2)) - images[:, 2].mean((1, 2))
    cover = (images.amin(1) < 0.9).float().mean((1, 2))
    levels = {"light": _scaled(light), "red": _scaled(red), "cover": _scaled(cover)}
    return Collection(images=images, held_out=torch.from_numpy(shipped.held_out)), levels


def ask(
    questions: Sequence[tuple[str, str, float]],
    levels: dict[str, Tensor],
    rows: Tensor,
    num: int,
    seed: int,
) -> Asked:
    """Draw pairs among `rows`, each question and each answer equally often, without those that are hard to call.

    Example:
        >>> levels = {"size": torch.arange(50.0)}
        >>> asked = ask([("which is larger", "size", 1.0)], levels, torch.arange(50), 30, seed=0)
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
        for label, (first, second) in enumerate(_drawn(sign * levels[name], rows, share, generator)):
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


def _scaled(values: Tensor) -> Tensor:
    return (values - values.mean()) / values.std()


log = logging.getLogger("trimtab")
FILE = "pairs.npz"
WANTED = ("images", "pairs", "questions", "labels")


def own_pairs(folder: str, seed: int) -> tuple[Collection, Asked, Asked, tuple[str, ...]]:
    """The images, the pairs to train on, the held-out pairs, and the words of the questions."""
    path = Path(folder)
    path = path / FILE if path.is_dir() else path
    arrays = _read(path)
    images = _images(arrays["images"], path)
    pairs, labels = _whole(arrays, "pairs", path), _whole(arrays, "labels", path)
    num, texts = len(pairs), [str(text).strip().lower() for text in arrays["questions"].reshape(-1)]
    if pairs.shape != (num, 2) or labels.shape != (num,) or len(texts) != num:
        raise InputError(
            f"{path} holds pairs {list(pairs.shape)}, labels {list(labels.shape)} and {len(texts)} questions; expected "
            "[m, 2], [m] and m of them"
        )
    _within(pairs, len(images), "pairs", "the number of an image", path)
    _within(labels, len(ANSWERS), "labels", "0 (First), 1 (Second) or 2 (Similar)", path)
    if not all(texts):
        raise InputError(f"{path}: question {texts.index('')} is empty; expected words with spaces between them")
    held = _held(arrays.get("held_out"), len(images), seed, path)
    collection = Collection(images=torch.from_numpy(images), held_out=torch.from_numpy(held))
    words = vocabulary(texts)
    prompts, both = encode(texts, words), held[pairs]
    seen, unseen = (~both).all(1), both.all(1)
    if not seen.any() or not unseen.any():
        raise InputError(
            f"{path} has {int(seen.sum())} pairs of images to train on and {int(unseen.sum())} of held-out images; "
            "expected some of each: give more pairs, or say with held_out which images are held out"
        )
    if mixed := int((~seen & ~unseen).sum()):
        log.warning("%s: %d of %d pairs show one held-out image and one that is not; left out", path, mixed, num)
    made = [
        Asked(
            first=torch.from_numpy(pairs[rows, 0]),
            second=torch.from_numpy(pairs[rows, 1]),
            prompts=prompts[torch.from_numpy(rows)],
            labels=torch.from_numpy(labels[rows]),
        )
        for rows in (seen, unseen)
    ]
    return collection, made[0], made[1], words


def _read(path: Path) -> dict[str, NDArray[np.generic]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        text = " ".join(str(error).split())[:200]
        raise InputError(
            f"{path} cannot be read: {text}; expected pairs.csv with pictures, or {FILE} with {', '.join(WANTED)}"
        ) from None
    if missing := [key for key in WANTED if key not in arrays]:
        raise InputError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(arrays) or 'nothing'}")
    return arrays


def _images(given: NDArray[np.generic], path: Path) -> NDArray[np.float32]:
    if given.ndim == 3:
        given = given[..., None]
    if given.ndim != 4 or not len(given) or min(given.shape[1:3]) < 4 or given.dtype.kind not in "uif":
        raise InputError(
            f"{path}: images are {list(given.shape)} of {given.dtype}; expected numbers [n, height, width] or "
            "[n, height, width, channels] of 4 pixels or more a side"
        )
    scale = 255.0 if given.dtype.kind in "ui" else 1.0
    return np.ascontiguousarray(given.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(scale)


def _whole(arrays: dict[str, NDArray[np.generic]], name: str, path: Path) -> NDArray[np.int64]:
    given = arrays[name]
    if given.dtype.kind not in "ui":
        raise InputError(f"{path}: {name} are of {given.dtype}; expected whole numbers")
    return given.astype(np.int64)


def _within(given: NDArray[np.int64], end: int, name: str, what: str, path: Path) -> None:
    wrong = (given < 0) | (given >= end)
    if wrong.any():
        row = int(np.argwhere(wrong)[0, 0])
        value = int(given[wrong].reshape(-1)[0])
        raise InputError(f"{path}: {name} has {value} in row {row}; expected {what}, from 0 to {end - 1}")


def _held(given: NDArray[np.generic] | None, num: int, seed: int, path: Path) -> NDArray[np.bool_]:
    if given is None:
        held = np.zeros(num, dtype=bool)
        held[np.random.default_rng(seed).permutation(num)[: max(round(HELD_OUT * num), 1)]] = True
        return held
    if given.shape != (num,):
        raise InputError(f"{path}: held_out is {list(given.shape)}; expected [{num}], one for each image")
    return given.astype(bool)
