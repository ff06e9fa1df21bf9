"""The user's own pictures and masks: where they are, in every common layout, and how they are read.

Files are found and their headers compared before training; pictures are decoded one by one when they are needed, in
the loader's workers, so that a data set of any size fits in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from trimtab.core.errors import InputError
from trimtab.train.data_problems import DataError, refuse
from trimtab.train.own_data.picture_files import (
    ARRAYS,
    PICTURES,
    Bytes,
    need_decoder,
    picture_size,
    read_picture,
)
from trimtab.train.recipes.segment.masks import read_mask

IMAGES = ("images", "image", "imgs", "img")
MASKS = ("masks", "mask", "gt", "gts", "gt_object", "gt_objects", "labels", "label", "annotations", "annotation")
MASK_ENDINGS = ("", "_mask", "-mask", "_gt", "_seg", "_segmentation", "_label")
"""What the name of a mask may have behind that of its picture."""
SPLITS = {
    "train": ("train", "training", "traindataset"),
    "val": ("val", "valid", "validation", "valdataset"),
    "test": ("test", "testing", "testdataset"),
}
LAYOUTS = "images/ and masks/, Imgs/ and GT/, Train/Image/ and Train/GT_Object/, TrainDataset/, or train/ and val/"


class Pair(NamedTuple):
    """A picture and its mask."""

    image: Path
    mask: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The pairs of each split; `val` and `test` are empty where they are not given."""

    train: tuple[Pair, ...]
    val: tuple[Pair, ...] = ()
    test: tuple[Pair, ...] = ()


def find_pictures(root: Path) -> Found:
    """All pictures below `root` with their masks, by split.

    A mask belongs to the picture of the same name, whatever their endings; `_mask` or `_gt` may follow the name, and
    both may be in folders of the same name. Layouts: `images` and `masks` (or `Imgs` and `GT`, or `Image` and
    `GT_Object`) in the folder itself, or in folders `Train`, `train` or `TrainDataset`, and the same for `val` and
    `test`; `TestDataset` may hold several data sets. Also `images/train` and `masks/train`. A folder that holds nothing
    but one other is gone through, as archives have it. Every problem is told with its file: a picture without a mask, a
    file that cannot be read, a mask of another size.
    """
    if not root.is_dir():
        raise InputError(f"{root} is not a folder; expected one with {LAYOUTS}")
    if (inner := _only_folder(root)) is not None:
        return find_pictures(inner)
    splits = {split: list(_pairs_of(_split_folders(root, split))) for split in SPLITS}
    if not splits["train"] and (pair := _pair_of_folders(root)) is not None:
        splits["train"] = list(_pairs_of([pair]))
    if not splits["train"]:
        there = sorted(one.name for one in root.iterdir())[:6]
        raise InputError(f"{root} is not a data set: expected {LAYOUTS}; found {there or 'nothing'}")
    found = Found(**{split: tuple(pairs) for split, pairs in splits.items()})
    pairs = (*found.train, *found.val, *found.test)
    need_decoder([path for pair in pairs for path in pair])
    refuse(problem for pair in pairs for problem in _size_problems(pair))
    return found


def _only_folder(root: Path) -> Path | None:
    """The only folder in this one, where that is not one of pictures or of a split."""
    folders = [one for one in _folders(root) if not one.name.startswith((".", "__"))]
    known = (*IMAGES, *MASKS, *(name for names in SPLITS.values() for name in names))
    return folders[0] if len(folders) == 1 and folders[0].name.lower() not in known else None


def _split_folders(root: Path, split: str) -> Iterator[tuple[Path, Path]]:
    """The folders of pictures and masks of one split."""
    for folder in _named(root, SPLITS[split]):
        if (pair := _pair_of_folders(folder)) is not None:
            yield pair
            continue
        for below in _folders(folder):  # several data sets to test on
            if (pair := _pair_of_folders(below)) is not None:
                yield pair
    images, masks = _first(root, IMAGES), _first(root, MASKS)
    if images is not None and masks is not None:  # images/train and masks/train
        yield from zip(_named(images, SPLITS[split]), _named(masks, SPLITS[split]), strict=False)


def _pair_of_folders(root: Path) -> tuple[Path, Path] | None:
    images, masks = _first(root, IMAGES), _first(root, MASKS)
    if images is None or masks is None:
        return None
    return _innermost(images, IMAGES), _innermost(masks, MASKS)


def _innermost(folder: Path, names: Sequence[str]) -> Path:
    """The folder, or the one of the same kind in it: `GT_Objects/GT_Object`."""
    inner = _first(folder, names)
    return folder if inner is None or _files(folder) else inner


def _first(root: Path, names: Sequence[str]) -> Path | None:
    return min(_named(root, names), key=lambda one: names.index(one.name.lower()), default=None)


def _named(root: Path, names: Sequence[str]) -> list[Path]:
    return [one for one in _folders(root) if one.name.lower() in names]


def _folders(root: Path) -> list[Path]:
    return sorted(one for one in root.iterdir() if one.is_dir())


def _files(folder: Path) -> list[Path]:
    """Its pictures; hidden files are none, such as those that macOS puts beside every file of an archive."""
    found = (one for one in folder.iterdir() if one.suffix.lower() in ARRAYS + PICTURES)
    return sorted(one for one in found if not one.name.startswith(".") and one.is_file())


def _pairs_of(folders: Iterable[tuple[Path, Path]]) -> Iterator[Pair]:
    for pictures, masks in folders:
        truths, images = _by_name(masks), _by_name(pictures)
        if not images:
            raise DataError(f"{pictures} holds no pictures; expected files ending in {', '.join(ARRAYS + PICTURES)}")
        refuse(
            f"{one} has no mask of the same name in {masks}; add the mask or remove the picture"
            for name, one in images.items()
            if _mask_of(name, truths) is None
        )
        found = ((one, _mask_of(name, truths)) for name, one in images.items())
        yield from (Pair(one, mask) for one, mask in found if mask is not None)


def _by_name(folder: Path) -> dict[str, Path]:
    """Its pictures by name without ending; where there are none, those of the folders in it, each with its folder."""
    files = _files(folder) or [one for below in sorted(folder.rglob("*")) if below.is_dir() for one in _files(below)]
    names = (one.relative_to(folder).with_suffix("").as_posix() for one in files)
    return {normalize("NFC", name): one for name, one in zip(names, files, strict=True)}  # macOS divides accents


def _mask_of(name: str, masks: Mapping[str, Path]) -> Path | None:
    return next((masks[name + ending] for ending in MASK_ENDINGS if name + ending in masks), None)


# -- reading -----------------------------------------------------------------------------------------------------------


class Pictures(Dataset[tuple[Tensor, Tensor]]):
    """Pictures `[3, side, side]` around zero with masks `[1, side, side]` of 0 and 1, decoded when they are asked for.

    What was decoded is kept as bytes up to `cache_bytes`, shared evenly among the workers of a loader: what fits is
    decoded once, and the rest again in every epoch.
    """

    def __init__(self, pairs: Sequence[Pair], side: int, *, cache_bytes: int = 0) -> None:
        if side < 16 or side % 4:
            raise InputError(f"img_size is {side}; expected a multiple of 4, at least 16")
        self.pairs, self.side, self.cache_bytes = tuple(pairs), side, cache_bytes
        self._kept: dict[int, tuple[Bytes, Bytes]] = {}

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """One picture and its mask; a DataError names a file that cannot be used."""
        found = self._kept.get(index)
        if found is None:
            found = read_pair(self.pairs[index], self.side)
            if (len(self._kept) + 1) * (found[0].nbytes + found[1].nbytes) <= self._room():
                self._kept[index] = found
        image, mask = found
        colours = torch.from_numpy(image).float()  # then in place: every copy is one more hole in the heap
        return colours.div_(255.0).sub_(0.5).div_(0.2), torch.from_numpy(mask).float()

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": {}}  # a worker that is spawned begins with an empty cache

    def problems(self) -> Iterator[str]:
        """Decode every file, and yield what is wrong with it."""
        for pair in self.pairs:
            try:
                read_pair(pair, self.side)
            except DataError as error:
                yield from error.problems

    def _room(self) -> int:
        info = get_worker_info()
        return self.cache_bytes // (1 if info is None else info.num_workers)


def read_pair(pair: Pair, side: int) -> tuple[Bytes, Bytes]:
    """A picture `[3, side, side]` of bytes and its mask `[1, side, side]` of 0 and 1; a DataError names the file."""
    refuse(_size_problems(pair))
    return read_picture(pair.image, side=side, planes=3), read_mask(pair.mask, side)


def _size_problems(pair: Pair) -> Iterator[str]:
    """What the headers of a pair tell; nothing is decoded."""
    sizes = []
    for path in pair:
        try:
            sizes.append(picture_size(path))
        except DataError as error:
            yield from error.problems
    if len(sizes) == 2 and sizes[0] != sizes[1]:
        (a, b), (c, d) = sizes
        yield f"{pair.image} is {a} x {b} pixels and its mask {pair.mask} {c} x {d}; expected the same size"
