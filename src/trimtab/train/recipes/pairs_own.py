"""The user's own pairs from an `.npz` file, read without pickles, each mistake in it named.

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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.core.errors import InputError
from trimtab.train.recipes.pairs_data import ANSWERS, HELD_OUT, Asked, Collection, encode, vocabulary

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


def _read(path: Path) -> dict[str, NDArray[Any]]:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except (OSError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        told = " ".join(str(error).split())[:200]
        raise InputError(f"{path} cannot be read: {told}; expected {FILE} with {', '.join(WANTED)}") from None
    if missing := [key for key in WANTED if key not in arrays]:
        raise InputError(f"{path} lacks {', '.join(missing)}; it holds {', '.join(arrays) or 'nothing'}")
    return arrays


def _images(given: NDArray[Any], path: Path) -> NDArray[np.float32]:
    if given.ndim == 3:
        given = given[..., None]
    if given.ndim != 4 or not len(given) or min(given.shape[1:3]) < 4 or given.dtype.kind not in "uif":
        raise InputError(
            f"{path}: images are {list(given.shape)} of {given.dtype}; expected numbers [n, height, width] or "
            "[n, height, width, channels] of 4 pixels or more a side"
        )
    scale = 255.0 if given.dtype.kind in "ui" else 1.0
    return np.ascontiguousarray(given.transpose(0, 3, 1, 2), dtype=np.float32) / np.float32(scale)


def _whole(arrays: dict[str, NDArray[Any]], name: str, path: Path) -> NDArray[np.int64]:
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


def _held(given: NDArray[Any] | None, num: int, seed: int, path: Path) -> NDArray[np.bool_]:
    if given is None:
        held = np.zeros(num, dtype=bool)
        held[np.random.default_rng(seed).permutation(num)[: max(round(HELD_OUT * num), 1)]] = True
        return held
    if given.shape != (num,):
        raise InputError(f"{path}: held_out is {list(given.shape)}; expected [{num}], one for each image")
    return given.astype(bool)
