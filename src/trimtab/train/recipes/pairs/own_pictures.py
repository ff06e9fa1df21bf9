"""A user's own pairs as files: `pairs.csv` with the columns image_a, image_b, question and answer, and the pictures.

The pictures are named from the folder of the file, or from `images` in it. A column `split` (train, val, test) says
which pairs belong where. Without it a fifth is held out so that no picture is on both sides: whole groups of pairs that
share pictures if there are such groups, else a fifth of the pictures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trimtab.core.errors import InputError
from trimtab.train.data_problems import DataError, refuse
from trimtab.train.own_data.picture_files import PictureFiles, find_picture, need_decoder
from trimtab.train.own_data.row_files import (
    TEST,
    TRAIN,
    VAL,
    RowFile,
    is_blank,
    named_like_a_split,
    parts_of,
    read_rows,
)
from trimtab.train.recipes.pairs.data import ANSWERS, HELD_OUT, Asked, encode, vocabulary

FILES = ("pairs.csv", "pairs.tsv", "pairs.jsonl", "pairs.parquet")
COLUMNS = ("image_a", "image_b", "question", "answer")
SPELT = {name.lower(): i for i, name in enumerate(ANSWERS)} | {str(i): i for i in range(len(ANSWERS))}
SPELT |= {"a": 0, "b": 1, "image_a": 0, "image_b": 1, "same": 2, "equal": 2, "both": 2}
LARGEST_GROUP = 0.5
"""Groups of pairs are held out whole unless one of them has a larger share of all pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnPairs:
    """The pictures, the pairs of each part, the words of the questions, and a line for people."""

    images: PictureFiles
    parts: Mapping[str, Asked]
    words: tuple[str, ...]
    line: str


def pairs_file(folder: str) -> Path | None:
    """The file of pairs that a path means: itself, or the one in that folder; None if it is an array file or none."""
    path = Path(folder)
    if path.is_dir():
        return next((path / name for name in FILES if (path / name).is_file()), None)
    return path if path.suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet") else None


def read_pairs(path: Path, seed: int, side: int) -> OwnPairs:
    """Read the pairs and find their pictures; DataError with file and row for what is wrong."""
    rows = read_rows(path)
    for name in COLUMNS:
        rows.column(name, "image_a, image_b, question and answer are needed")
    images, first, second = _images(rows, side)
    answers = [SPELT.get(str(cell).strip().lower(), -1) for cell in rows.cells["answer"]]
    texts = [str(cell).strip().lower() for cell in rows.cells["question"]]
    refuse(_problems(rows, answers))
    named = named_like_a_split(rows)
    parts, said = (parts_of(rows, named), f"by the column {named}") if named else _held_out(rows, first, second, seed)
    which = {part: [i for i, one in enumerate(parts) if one == part] for part in (TRAIN, VAL, TEST)}
    _check_parts(rows, which, answers)
    words = vocabulary(texts)
    prompts = encode(texts, words)
    made = {
        part: Asked(
            first=torch.tensor([first[i] for i in at]),
            second=torch.tensor([second[i] for i in at]),
            prompts=prompts[at],
            labels=torch.tensor([answers[i] for i in at]),
        )
        for part, at in which.items()
        if at
    }
    sizes = ", ".join(f"{len(at)} {part}" for part, at in which.items() if at)
    left = sum(not part for part in parts)
    line = f"{path}: {sizes} pairs ({said}), {len(images)} pictures at {side} x {side}"
    line += f"; {left} pairs show one held-out picture and one that is not, and are left out" if left else ""
    return OwnPairs(images=images, parts=made, words=words, line=line)


def _images(rows: RowFile, side: int) -> tuple[PictureFiles, list[int], list[int]]:
    """Every picture once, and the number of the first and the second of each pair."""
    folder, numbers = rows.path.parent, dict[Path, int]()
    places, problems = list[str](), list[str]()
    at: dict[str, list[int]] = {"image_a": [], "image_b": []}
    known: dict[str, Path | None] = {}
    for i in range(len(rows)):
        for column, found in at.items():
            cell = rows.cells[column][i]
            name = "" if is_blank(cell) else str(cell).strip()
            if name not in known:
                known[name] = find_picture(name, (folder, folder / "images")) if name else None
            path = known[name]
            if path is None:
                wrong = f"there is no picture {name!r} in {folder} or {folder / 'images'}" if name else "no picture"
                problems.append(f"{rows.where(i, column)}: {wrong}; expected the name of a file")
                continue
            if path not in numbers:
                numbers[path] = len(numbers)
                places.append(rows.where(i, column))
            found.append(numbers[path])
    refuse(problems)
    need_decoder(list(numbers))
    images = PictureFiles(list(numbers), places, side=side)
    refuse(images.problems(every=False))
    return images, at["image_a"], at["image_b"]


def _problems(rows: RowFile, answers: Sequence[int]) -> Iterator[str]:
    for i, answer in enumerate(answers):
        cell = rows.cells["answer"][i]
        if answer < 0:
            given = "no answer" if is_blank(cell) else repr(str(cell)[:40])
            yield f"{rows.where(i, 'answer')}: {given}; expected First, Second or Similar"
        if is_blank(rows.cells["question"][i]):
            yield f"{rows.where(i, 'question')}: no question; expected words with spaces between them"


def _check_parts(rows: RowFile, which: Mapping[str, Sequence[int]], answers: Sequence[int]) -> None:
    if not which[TRAIN] or not which[VAL]:
        raise InputError(
            f"{rows.path} has {len(which[TRAIN])} pairs to train on and {len(which[VAL])} to validate on; expected "
            "some of each: give more pairs, or a column split of train, val and test"
        )
    seen = {answers[i] for i in which[TRAIN]}
    unseen = [i for part in (VAL, TEST) for i in which[part] if answers[i] not in seen]
    if unseen:
        raise DataError(
            f"{rows.where(i, 'answer')}: {ANSWERS[answers[i]]} never occurs in training; move pairs of it to training"
            for i in unseen
        )


def _held_out(rows: RowFile, first: Sequence[int], second: Sequence[int], seed: int) -> tuple[list[str], str]:
    """A part for each pair, "" for none, so that no picture is on both sides; and how."""
    group = _groups(first, second)
    sizes = np.bincount(group)
    draw, wanted = np.random.default_rng(seed), max(round(HELD_OUT * len(first)), 1)
    if len(sizes) >= 5 and sizes.max() <= LARGEST_GROUP * len(first):
        held, taken = set[int](), 0
        for one in draw.permutation(len(sizes)).tolist():
            if taken < wanted:
                held.add(one)
                taken += int(sizes[one])
        return [VAL if one in held else TRAIN for one in group], f"pairs that share no picture, by seed {seed}"
    num = max(*first, *second) + 1
    away = set(draw.permutation(num)[: max(round(HELD_OUT * num), 2)].tolist())
    both = [(a in away) + (b in away) for a, b in zip(first, second, strict=True)]
    return [(TRAIN, "", VAL)[one] for one in both], f"a fifth of the pictures held out by seed {seed}"


def _groups(first: Sequence[int], second: Sequence[int]) -> list[int]:
    """The number of the group of each pair: pairs that share a picture, directly or through others, are one.

    Example:
        >>> _groups([0, 1, 4], [1, 2, 5])
        [0, 0, 1]
    """
    parent: dict[int, int] = {}

    def root(one: int) -> int:
        while parent.setdefault(one, one) != one:
            parent[one] = one = parent[parent[one]]
        return one

    for a, b in zip(first, second, strict=True):
        parent[root(a)] = root(b)
    numbers: defaultdict[int, int] = defaultdict(lambda: len(numbers))
    return [numbers[root(a)] for a in first]
