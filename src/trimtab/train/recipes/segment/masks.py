"""What a mask says is object: grey values, numbers of classes, colours, palettes and alpha, each as people write them.

| the file holds | object is |
|---|---|
| grey values, bits, numbers from 0 to 1 | the upper half |
| 0 and small numbers (classes), perhaps 255 for what is not judged | every number but 0 |
| colours | what is not black; in a palette without black, what is not its first colour |
| one colour, and an alpha that varies | where alpha is in its upper half |

A lossy file (JPEG) adds noise to every value: small numbers in it are ground.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.train.data_problems import DataError
from trimtab.train.own_data.picture_files import ARRAYS, Bytes, load_array, unreadable

LOSSY = ("JPEG", "WEBP", "MPO")
DARKEST_COLOUR = 32
"""Colours for classes are at least so bright in one plane; what is darker is black with noise."""
GREY_SPREAD = 32
"""Planes that differ by less are grey, with noise."""
NUM_SHOWN = 6
Truth = NDArray[np.bool_]


def read_mask(path: Path, side: int) -> Bytes:
    """A mask as `[1, side, side]` of 0 and 1; DataError if it cannot be read, or what is ground cannot be known."""
    truth = _of_array(load_array(path), path) if path.suffix.lower() in ARRAYS else _of_picture(path)
    rows, columns = (_middles(extent, side) for extent in truth.shape)
    return np.ascontiguousarray(truth[rows[:, None], columns][None]).view(np.uint8)


def _middles(extent: int, side: int) -> NDArray[np.int64]:
    """The nearest of `extent` pixels for the middle of each of `side`: no value is made of several."""
    return (2 * np.arange(side) + 1) * extent // (2 * side)


def _of_picture(path: Path) -> Truth:
    from PIL import Image

    try:
        with Image.open(path) as picture:
            lossy = picture.format in LOSSY
            if picture.mode == "P":
                return _of_palette(picture, path)
            if picture.mode.endswith(("A", "a")):
                planes = np.asarray(picture.convert("RGBA"))
                if (planes[..., :3] == planes[0, 0, :3]).all() and np.ptp(planes[..., 3]):
                    return np.asarray(planes[..., 3] > 127)
                return _of_colours(planes[..., :3], path, lossy=lossy)
            if picture.mode in ("L", "1") or picture.mode.startswith(("I", "F")):
                return _of_numbers(np.asarray(picture), path, lossy=lossy)
            return _of_colours(np.asarray(picture.convert("RGB")), path, lossy=lossy)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(unreadable(path, "a picture", error)) from None


def _of_palette(picture: Any, path: Path) -> Truth:
    """By the colours that the mask uses: all grey is a grey mask; else black or the first colour is ground."""
    numbers = np.asarray(picture)
    used = np.flatnonzero(np.bincount(numbers.reshape(-1), minlength=256))
    colours = np.zeros((256, 3), np.uint8)
    given = np.asarray(picture.getpalette() or (), np.uint8).reshape(-1, 3)[:256]
    colours[: len(given)] = given
    if not np.ptp(colours[used].astype(np.int64), axis=1).any():
        return _of_numbers(colours[:, 0][numbers], path, lossy=False)
    black: Truth = np.logical_not(colours.any(axis=1))
    return np.asarray(~black[numbers] if black[used].any() else numbers != 0)


def _of_colours(planes: NDArray[np.uint8], path: Path, *, lossy: bool) -> Truth:
    brightest, darkest = planes.max(2), planes.min(2)
    if (brightest - darkest).max() < GREY_SPREAD:
        return _of_numbers(brightest, path, lossy=lossy)
    truth = np.asarray(brightest >= (2 * DARKEST_COLOUR if lossy else DARKEST_COLOUR))
    if truth.all() and np.ptp(planes.reshape(-1, 3), axis=0).max() >= GREY_SPREAD:
        raise DataError(f"{path} holds colours and no black; expected the ground in black and objects in other colours")
    return truth


def _of_numbers(values: NDArray[Any], path: Path, *, lossy: bool) -> Truth:
    """Grey values, or numbers of classes: these have nothing in the upper half, but perhaps its highest value."""
    if values.dtype.kind == "b":
        return np.asarray(values)
    lowest, highest = values.min(), values.max()
    whole = values.dtype.kind in "ui" or highest > 1
    if (
        not (np.isfinite(lowest) and np.isfinite(highest))
        or lowest < 0
        or (whole and (values != np.floor(values)).any())
    ):
        raise DataError(
            f"{path} holds {values.dtype} values from {lowest} to {highest}; expected 0 for the ground and 1, 255 or "
            "the number of a class for an object, or numbers from 0 to 1"
        )
    if not whole:
        return np.asarray(values > 0.5)
    top = 255 if highest <= 255 else 65_535
    upper = values[values > top // 2]
    if (lossy and highest > 1) or (upper.size and (upper != top).any()):
        return np.asarray(values > top // 2)
    if lowest > 0 and lowest != highest and not upper.size:
        several = np.unique(values)
        shown = ", ".join(str(int(one)) for one in several[:NUM_SHOWN]) + (", ..." if len(several) > NUM_SHOWN else "")
        raise DataError(f"{path} holds the values {shown} and no 0; expected 0 for the ground, others for objects")
    return np.asarray(values > 0)


def _of_array(array: NDArray[Any], path: Path) -> Truth:
    if array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[..., 0]
    if array.ndim not in (2, 3) or 0 in array.shape or array.dtype.kind not in "buif" or array.shape[2:] > (4,):
        raise DataError(
            f"{path} holds {array.dtype} of shape {array.shape}; expected a mask [h, w], or colours [h, w, 3]"
        )
    if array.ndim == 2:
        return _of_numbers(array, path, lossy=False)
    if array.dtype == np.uint8 and array.max() > 1:
        return _of_colours(array[..., :3], path, lossy=False)
    return _of_numbers(array[..., :3].max(2), path, lossy=False)
