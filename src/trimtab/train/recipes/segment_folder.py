"""The user's own pictures and masks: two folders with files of the same names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from trimtab.core.errors import InputError
from trimtab.train.recipes.segment_data import Scenes, standardised

FOLDERS = (("images", "masks"), ("Imgs", "GT"))
ARRAYS, PICTURES = (".npy", ".npz"), (".png", ".jpg", ".jpeg", ".bmp", ".webp")


def read_folder(path: str, side: int) -> Scenes:
    """All pictures below `path/images` (or `Imgs`) with their masks in `path/masks` (or `GT`), brought to one size.

    A mask belongs to the picture of the same name, whatever their endings; a value in its upper half is object. Files
    are `.npy` or `.npz` (one array: grey, `[h, w, 3]` or `[3, h, w]`; bytes, or 0 to 1), or pictures that Pillow reads.
    What does not fit is told with its file name before anything is trained.
    """
    pictures, masks = _folders(Path(path))
    truths = {one.stem: one for one in _files(masks)}
    images = _files(pictures)
    if not images:
        raise InputError(f"{pictures} holds no pictures; expected files ending in {', '.join(ARRAYS + PICTURES)}")
    if missing := [one.name for one in images if one.stem not in truths]:
        raise InputError(
            f"{len(missing)} of {len(images)} pictures in {pictures} have no mask of the same name in {masks}: "
            f"{', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}; add the masks or take the pictures away"
        )
    rows = [_pair(one, truths[one.stem], side) for one in images]
    return Scenes(
        images=standardised(np.stack([image for image, _ in rows])), masks=np.stack([mask for _, mask in rows])
    )


def _folders(root: Path) -> tuple[Path, Path]:
    for images, masks in FOLDERS:
        if (root / images).is_dir() and (root / masks).is_dir():
            return root / images, root / masks
    wanted = " or ".join(f"{images}/ and {masks}/" for images, masks in FOLDERS)
    there = sorted(one.name for one in root.iterdir())[:6] if root.is_dir() else "no such folder"
    raise InputError(f"{root} is no data set: expected folders {wanted}, found {there}")


def _files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.suffix.lower() in ARRAYS + PICTURES)


def _pair(image: Path, mask: Path, side: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    colours, truth = _planes(image), _planes(mask).mean(0, keepdim=True)
    if colours.shape[1:] != truth.shape[1:]:
        sizes = [" x ".join(map(str, one.shape[:0:-1])) for one in (colours, truth)]
        raise InputError(f"{image} is {sizes[0]} pixels and its mask {mask} {sizes[1]}; expected the same size")
    colours = functional.interpolate(colours[None], (side, side), mode="bilinear", antialias=True)[0].clamp(0.0, 1.0)
    truth = functional.interpolate(truth[None], (side, side), mode="nearest")[0]
    return colours.numpy(), (truth > 0.5).float().numpy()


def _planes(path: Path) -> Tensor:
    """Three planes of 0 to 1."""
    array = _array(path) if path.suffix.lower() in ARRAYS else _picture(path)
    if array.ndim == 2:
        array = np.repeat(array[..., None], 3, axis=2)
    elif array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise InputError(f"{path} holds an array of shape {array.shape}; expected [h, w], [h, w, 3] or [3, h, w]")
    if array.dtype == np.bool_:
        values = array.astype(np.float32)
    elif np.issubdtype(array.dtype, np.integer):
        values = array.astype(np.float32) / (255.0 if array.max() > 1 else 1.0)
    else:
        values = array.astype(np.float32)
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
        raise InputError(
            f"{path} holds {array.dtype} values from {array.min()} to {array.max()}; "
            "expected bytes, or finite numbers from 0 to 1"
        )
    planes = torch.from_numpy(np.ascontiguousarray(np.moveaxis(values[..., :3], 2, 0)))
    return planes.expand(3, -1, -1)


def _array(path: Path) -> NDArray[Any]:
    try:
        found = np.load(path, allow_pickle=False)
        if isinstance(found, np.ndarray):
            return found
        with found as several:
            if len(several.files) != 1:
                raise InputError(f"{path} holds {len(several.files)} arrays; expected one")
            one: NDArray[Any] = several[several.files[0]]
            return one
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as an array: {error}; write it anew, or take it away") from None


def _picture(path: Path) -> NDArray[Any]:
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            f"{path} needs a decoder, which is not installed: pip install 'trimtab[images]'. Arrays (.npy, "
            ".npz) are read without one"
        ) from None
    try:
        with Image.open(path) as picture:
            return np.asarray(picture.convert("RGB"))
    except OSError as error:
        raise InputError(f"{path} cannot be read as a picture: {error}; write it anew, or take it away") from None
