"""A user's own pictures: found by name, checked, decoded when they are asked for, and kept within a bound."""

from __future__ import annotations

import unicodedata
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torch.utils.data import get_worker_info

from trimtab.core.errors import InputError
from trimtab.train.data_problems import DataError

ARRAYS, PICTURES = (".npy", ".npz"), (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".tif", ".tiff")
NUM_DECODED = 2_000
"""Up to so many files are decoded before training; of more only the heads are read, and `trimtab doctor` reads all."""
CACHE_BYTES = 2**30
Bytes = NDArray[np.uint8]


class PictureFiles:
    """Pictures `[planes, side, side]` from 0 to 1, by number; each is decoded when it is first asked for.

    `places` says where each path was given (file and row), for messages. What was decoded is kept as bytes up to
    `cache_bytes`, in every worker its share of them, so that memory does not grow with the number of files.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        places: Sequence[str],
        *,
        side: int,
        planes: int = 3,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.paths, self.places, self.side, self.planes = tuple(paths), tuple(places), side, planes
        self._room, self._kept, self._held = cache_bytes, dict[int, Bytes](), 0

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """As that of a tensor which holds them all."""
        return len(self.paths), self.planes, self.side, self.side

    def __getitem__(self, index: int | Tensor) -> Tensor:
        """One picture; DataError with file and row if it cannot be read."""
        i = int(index)
        found = self._kept.get(i)
        if found is None:
            try:
                found = read_picture(self.paths[i], side=self.side, planes=self.planes)
            except DataError as error:
                raise DataError(f"{self.places[i]}: {error}") from None
            worker = get_worker_info()
            if self._held + found.nbytes <= self._room // (1 if worker is None else worker.num_workers):
                self._kept[i] = found
                self._held += found.nbytes
        return torch.from_numpy(found).float().div_(255.0)  # in place: one copy, not two

    def problems(self, *, every: bool = True) -> Iterator[str]:
        """What cannot be read. Without `every`, of very many files only the heads are looked at."""
        decode = every or len(self.paths) <= NUM_DECODED
        for path, place in zip(self.paths, self.places, strict=True):
            try:
                if decode:
                    read_picture(path, side=self.side, planes=self.planes)
                else:
                    picture_size(path)
            except DataError as error:
                yield f"{place}: {error}"


def read_picture(path: Path, *, side: int, planes: int) -> Bytes:
    """One file as bytes `[planes, side, side]`; DataError if it cannot be read.

    Files are what Pillow reads, or `.npy` and `.npz` with one array: `[h, w]`, `[h, w, c]` or `[c, h, w]`, bytes or
    numbers from 0 to 1. 16-bit pictures (depth) keep their order and lose the finer steps.
    """
    if path.suffix.lower() in ARRAYS:
        values = torch.from_numpy(_planes_of(load_array(path), path, planes))[None]
        if values.shape[2:] == (side, side):
            resized = values[0]
        else:
            resized = functional.interpolate(
                values, (side, side), mode="bilinear", antialias=True, align_corners=False
            )[0]
        return np.rint(resized.clamp(0.0, 1.0).numpy() * 255.0).astype(np.uint8)
    return _decoded(path, side, planes)


def _decoded(path: Path, side: int, planes: int) -> Bytes:
    from PIL import Image

    try:
        with Image.open(path) as opened:
            picture: Image.Image = opened
            if picture.mode.startswith("I") or picture.mode == "F":  # 16 bits or more: brought to 8 by its own range
                raw = np.asarray(picture, dtype=np.float64)
                top = 65535.0 if raw.max(initial=0.0) > 255 else 255.0
                picture = Image.fromarray(np.clip(raw / top * 255.0, 0, 255).astype(np.uint8))
            wanted = picture.convert("L" if planes == 1 else "RGB")
            pixels = np.asarray(
                wanted if wanted.size == (side, side) else wanted.resize((side, side), Image.Resampling.BILINEAR)
            )
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(unreadable(path, "a picture", error)) from None
    return np.ascontiguousarray(pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1))


def picture_size(path: Path) -> tuple[int, int]:
    """Width and height, by the head of the file alone; DataError if it is missing or is no picture."""
    if path.suffix.lower() in ARRAYS:
        shape = load_array(path, mapped=True).shape
        if len(shape) not in (2, 3) or 0 in shape:
            raise DataError(f"{path} holds an array of shape {shape}; expected [h, w], [h, w, 3] or [3, h, w]")
        if len(shape) == 3 and shape[2] not in (1, 3, 4) and shape[0] in (1, 3, 4):
            return shape[2], shape[1]
        return shape[1], shape[0]
    from PIL import Image

    try:
        with Image.open(path) as picture:
            return picture.width, picture.height
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(unreadable(path, "a picture", error)) from None


def need_decoder(paths: Sequence[Path]) -> None:
    """InputError with the line to install if a file needs Pillow and it is missing."""
    first = next((path for path in paths if path.suffix.lower() not in ARRAYS), None)
    if first is None:
        return
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise InputError(
            f"{first} needs a decoder, which is not installed: pip install 'trimtab[images]'. Arrays (.npy, .npz) are "
            "read without one"
        ) from None


def find_picture(name: str, folders: Sequence[Path]) -> Path | None:
    """The file of that name in the first folder that has it; None if there is none.

    The ending may be left out or be in the other case, folders may be divided as Windows does, and an accent may be a
    character of its own, as macOS stores it.
    """
    spelt = dict.fromkeys((name, name.replace("\\", "/")))
    spelt |= dict.fromkeys(unicodedata.normalize(form, one) for one in tuple(spelt) for form in ("NFC", "NFD"))
    return next(
        (path for folder in folders for one in spelt for path in _endings(folder / one) if _is_file(path)), None
    )


def _endings(path: Path) -> Iterator[Path]:
    yield path
    if path.suffix.lower() in (*PICTURES, *ARRAYS):
        yield from (path.with_suffix(one) for one in (path.suffix.lower(), path.suffix.upper()) if one != path.suffix)
    elif path.name:
        for ending in (*PICTURES, *ARRAYS):
            yield from (path.with_name(path.name + one) for one in (ending, ending.upper()))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long for any file
        return False


def load_array(path: Path, *, mapped: bool = False) -> NDArray[np.generic]:
    """The only array of an `.npy` or `.npz`; DataError if it cannot be read."""
    try:
        found = np.load(path, allow_pickle=False, mmap_mode="r" if mapped and path.suffix == ".npy" else None)
        if isinstance(found, np.ndarray):
            return found
        with found as several:
            if len(several.files) != 1:
                raise DataError(f"{path} holds {len(several.files)} arrays; expected one")
            one: NDArray[np.generic] = several[several.files[0]]
            return one
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(unreadable(path, "an array", error)) from None


def _planes_of(array: NDArray[np.generic], path: Path, planes: int) -> NDArray[np.float32]:
    if array.ndim == 2:
        array = array[..., None]
    elif array.ndim == 3 and array.shape[2] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = np.moveaxis(array, 0, 2)
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape or array.dtype.kind not in "buif":
        raise DataError(f"{path} holds {array.dtype} of shape {array.shape}; expected [h, w], [h, w, 3] or [3, h, w]")
    scale = 255.0 if array.dtype.kind in "ui" and array.max() > 1 else 1.0
    values = array.astype(np.float32) / np.float32(scale)
    if not np.isfinite(values).all() or values.min() < 0 or values.max() > 1:
        raise DataError(
            f"{path} holds {array.dtype} values from {array.min()} to {array.max()}; expected bytes, or finite numbers "
            "from 0 to 1"
        )
    values = values[..., :3]
    if planes == 1:
        values = values.mean(2, keepdims=True)
    elif values.shape[2] == 1:
        values = np.repeat(values, planes, axis=2)
    return np.ascontiguousarray(np.moveaxis(values, 2, 0), dtype=np.float32)


def unreadable(path: Path, what: str, error: BaseException) -> str:
    """What to say of a file that cannot be read."""
    why = " ".join(str(error).split())[:160] or type(error).__name__
    return f"{path} cannot be read as {what}: {why}; write it again, or remove it"
