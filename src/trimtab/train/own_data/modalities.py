"""One modality of a user's own samples: pictures, depth, texts, series or vectors, read by number when needed.

A sample may lack a modality: `present` says where it is there. What was learnt from the training rows (means, spreads,
how rare a piece of a word is) is fixed by `fit`, and nothing of the other rows is looked at.
"""

from __future__ import annotations

import math
import wave
import zipfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.train.data_problems import DataError
from trimtab.train.own_data.picture_files import PictureFiles
from trimtab.train.text_features import PieceSums, hash_of, pieces

IMAGE, DEPTH, TEXT, SERIES, VECTOR = KINDS = ("image", "depth", "text", "series", "vector")
SERIES_NAMES = ("audio", "sound", "wave", "series", "signal", "speech", "imu", "ecg", "eeg", "sensor", "accel", "gyro")
DEPTH_NAMES = ("depth", "thermal", "infrared", "disparity", "grey", "gray")
LONGEST_VECTOR = 1024
LONGEST_SERIES = 4096
SMALLEST_SIDE = 8
LONGEST_SIDES = 4
"""A grid that is so many times longer than wide is a series, not a picture."""
SOUNDS = (".wav",)
_CPU = torch.device("cpu")
Present = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Modality:
    """What a tower gets of one modality: its name, its kind, and the shape of one sample of it."""

    name: str
    kind: str
    shape: tuple[int, ...]


class ViewColumn(Protocol):
    """All samples of one modality."""

    modality: Modality
    present: Present

    def __getitem__(self, row: int) -> Tensor:
        """One sample, of the shape of the modality; asked for only where it is present."""
        ...

    def fit(self, rows: Sequence[int]) -> None:
        """Learn what there is to learn from these rows."""
        ...

    def problems(self) -> Iterator[str]:
        """What cannot be read, with file and row; reads everything."""
        ...


class PictureColumn:
    """Pictures in files: three planes, or one for depth, around zero."""

    def __init__(self, name: str, kind: str, files: PictureFiles, at: Sequence[int]) -> None:
        self.modality = Modality(name=name, kind=kind, shape=(files.planes, files.side, files.side))
        self._files, self._at = files, np.asarray(at)
        self.present: Present = self._at >= 0

    def __getitem__(self, row: int) -> Tensor:
        return self._files[int(self._at[row])] - 0.5

    def fit(self, rows: Sequence[int]) -> None:
        """Nothing to learn."""

    def problems(self) -> Iterator[str]:
        """Pictures that cannot be read."""
        return self._files.problems()


class TextColumn:
    """Texts as rows of `width` numbers; what is kept of each is the numbers of its pieces."""

    def __init__(self, name: str, texts: Sequence[str], width: int) -> None:
        self.modality = Modality(name=name, kind=TEXT, shape=(width,))
        self._hashes = [array("H", [hash_of(piece) for piece in pieces(text)]) for text in texts]
        self.present: Present = np.array([bool(row) for row in self._hashes])
        self._sums, self._weights = PieceSums(width), dict[int, float]()
        self._rarest = 1.0

    def __getitem__(self, row: int) -> Tensor:
        hashes = self._hashes[row]
        return self._sums.rows([hashes], [[self._weights.get(one, self._rarest) for one in hashes]])[0]

    def fit(self, rows: Sequence[int]) -> None:
        """How rare each piece is among the training texts."""
        seen: Counter[int] = Counter()
        for i in rows:
            seen.update(self._hashes[i])
        self._rarest = math.log(len(rows) + 1)
        # A piece that every text has says nothing, but a text of such pieces alone must not become zero.
        self._weights = {one: max(math.log((len(rows) + 1) / (num + 1)), 1e-3) for one, num in seen.items()}

    def problems(self) -> Iterator[str]:
        """None: any text can be read."""
        return iter(())


class ArrayColumn:
    """An array `[samples, ...]` in memory or mapped from its file; a sample of nothing but NaN is missing."""

    def __init__(self, name: str, values: NDArray[np.generic], kind: str | None, path: Path) -> None:
        self._values, self._path = values, path
        kind = kind or kind_of_shape(name, values.shape[1:], path)
        self.present = _there(values)
        self._mean, self._spread = 0.0, 1.0
        self._order = _axes(kind, values.shape[1:], path, name)
        shape = tuple(values.shape[1:][i] for i in self._order) if self._order else values.shape[1:]
        shape = (1, *shape) if kind == DEPTH and len(shape) == 2 else shape
        shape = (1, *shape) if kind == SERIES and len(shape) == 1 else shape
        self.modality = Modality(name=name, kind=kind, shape=tuple(int(n) for n in shape))
        self._bytes = 1.0
        if values.dtype.kind in "ui" and kind in (IMAGE, DEPTH):
            self._bytes = 255.0 if values.dtype.itemsize == 1 or values.max(initial=0) <= 255 else 65_535.0

    def __getitem__(self, row: int) -> Tensor:
        sample = np.asarray(self._values[row])
        if self._order:
            sample = sample.transpose(self._order)
        found = torch.from_numpy(np.array(sample, dtype=np.float32, order="C")).reshape(self.modality.shape)
        return (found / self._bytes - self._mean) / self._spread

    def fit(self, rows: Sequence[int]) -> None:
        """Mean and spread of all numbers of some training samples; pictures are only brought around zero."""
        if self.modality.kind == IMAGE:
            self._mean = 0.5
            return
        some = [np.asarray(self._values[i], dtype=np.float64) / self._bytes for i in rows[:1000] if self.present[i]]
        if some:
            stacked = np.stack(some)
            self._mean, self._spread = float(stacked.mean()), float(stacked.std()) or 1.0

    def problems(self) -> Iterator[str]:
        """Samples that hold NaN or Inf beside numbers."""
        if self._values.dtype.kind != "f":
            return
        for i in range(len(self._values)):
            with np.errstate(over="ignore"):
                num = int((~np.isfinite(self._values[i].astype(np.float32))).sum()) if self.present[i] else 0
            if num:
                yield (
                    f"{self._path}, row {i + 1}, {self.modality.name!r}: {num} of {self._values[i].size} numbers are "
                    "NaN or Inf in float32; expected finite ones, or NaN in all of them where the modality is missing"
                )


class SeriesFiles:
    """Series in files, `.wav` or `.npy` `[time]` or `[time, channels]`, cut or filled up to one length."""

    def __init__(self, name: str, paths: Sequence[Path | None], places: Sequence[str], length: int) -> None:
        self._paths, self._places = paths, places
        self.present: Present = np.array([path is not None for path in paths])
        first = next(i for i, path in enumerate(paths) if path is not None)
        channels = self._read(first).shape[1]
        longest = max((len(self._read(i)) for i in range(len(paths)) if paths[i] is not None), default=1)
        self._length = length or min(longest, LONGEST_SERIES)
        self.modality = Modality(name=name, kind=SERIES, shape=(channels, self._length))
        self._mean, self._spread = 0.0, 1.0

    def _read(self, row: int) -> NDArray[np.float32]:
        path = self._paths[row]
        assert path is not None
        try:
            return read_series(path)
        except DataError as error:
            raise DataError(f"{self._places[row]}: {error}") from None

    def __getitem__(self, row: int) -> Tensor:
        values = self._read(row)[: self._length]
        if values.shape[1] != self.modality.shape[0]:
            raise DataError(
                f"{self._places[row]}: {self._paths[row]} has {values.shape[1]} channels; expected "
                f"{self.modality.shape[0]}, as the first one has"
            )
        found = torch.zeros(self.modality.shape, dtype=torch.float32, device=_CPU)
        found[:, : len(values)] = (torch.from_numpy(values.T.copy()) - self._mean) / self._spread
        return found

    def fit(self, rows: Sequence[int]) -> None:
        """Mean and spread of some training series."""
        some = [self._read(i) for i in rows[:200] if self.present[i]]
        if some:
            every = np.concatenate([one.reshape(-1) for one in some]).astype(np.float64)
            self._mean, self._spread = float(every.mean()), float(every.std()) or 1.0

    def problems(self) -> Iterator[str]:
        """Files that cannot be read."""
        for i, there in enumerate(self.present):
            try:
                if there:
                    self[i]
            except DataError as error:
                yield from error.problems


def read_series(path: Path) -> NDArray[np.float32]:
    """A file as `[time, channels]`; DataError if it cannot be read."""
    try:
        if path.suffix.lower() in SOUNDS:
            return _sound(path)
        values = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, wave.Error, zipfile.BadZipFile) as error:
        text = " ".join(str(error).split())[:160]
        raise DataError(f"{path} cannot be read as a series ({text}); write it again, or remove it") from None
    if not isinstance(values, np.ndarray) or values.ndim not in (1, 2) or values.dtype.kind not in "uif":
        raise DataError(f"{path} is no series; expected an array of numbers [time] or [time, channels]")
    found = np.ascontiguousarray(values.reshape(len(values), -1), dtype=np.float32)
    if not np.isfinite(found).all() or not found.size:
        raise DataError(f"{path} holds NaN, Inf or nothing; expected finite numbers")
    return found


def _sound(path: Path) -> NDArray[np.float32]:
    with wave.open(str(path), "rb") as file:
        width, channels = file.getsampwidth(), file.getnchannels()
        raw = file.readframes(file.getnframes())
    if width not in (1, 2, 4):
        raise DataError(f"{path} has {8 * width} bits a sample; expected 8, 16 or 32")
    kind = {1: np.uint8, 2: np.int16, 4: np.int32}[width]
    values = np.frombuffer(raw, dtype=kind).astype(np.float32)
    values = (values - 128.0) / 128.0 if width == 1 else values / float(2 ** (8 * width - 1))
    if not len(values):
        raise DataError(f"{path} has no samples; expected some")
    return np.ascontiguousarray(values.reshape(-1, channels), dtype=np.float32)


def kind_of_shape(name: str, shape: Sequence[int], path: Path) -> str:
    """What samples of that shape are: vectors, series, one plane or three; the name may say it.

    Example:
        >>> [kind_of_shape("x", s, Path("x.npz")) for s in ((32,), (3, 16, 16), (24, 24), (500, 6))]
        ['vector', 'image', 'depth', 'series']
        >>> kind_of_shape("audio", (800,), Path("x.npz"))
        'series'
    """
    like_series = any(word in name.lower() for word in SERIES_NAMES)
    if len(shape) == 1:
        return SERIES if like_series or shape[0] > LONGEST_VECTOR else VECTOR
    if len(shape) == 2:
        low, high = sorted(shape)
        return SERIES if like_series or low < SMALLEST_SIDE or high > LONGEST_SIDES * low else DEPTH
    if len(shape) == 3 and (shape[0] in (1, 3) or shape[-1] in (1, 3)):
        return DEPTH if 1 in (shape[0], shape[-1]) else IMAGE
    raise DataError(
        f"{path}: {name!r} has samples of shape {list(shape)}; expected [n] (a vector), [time, channels] (a series), "
        "[height, width] (one plane) or [height, width, 3] (a picture)"
    )


def _axes(kind: str, shape: Sequence[int], path: Path, name: str) -> tuple[int, ...]:
    """The order of axes that puts planes or channels first; () for as it is."""
    if kind in (IMAGE, DEPTH) and len(shape) == 3:
        return () if shape[0] in (1, 3) else (2, 0, 1)
    if kind == SERIES and len(shape) == 2:
        return (1, 0) if shape[0] >= shape[1] else ()
    fitting = {VECTOR: (1,), SERIES: (1,), IMAGE: (3,), DEPTH: (2,)}
    if len(shape) not in fitting.get(kind, ()):
        raise DataError(f"{path}: {name!r} has samples of shape {list(shape)}, which is no {kind}")
    return ()


def _there(values: NDArray[np.generic]) -> Present:
    if values.dtype.kind != "f":
        return np.ones(len(values), dtype=bool)
    return np.array([not bool(np.isnan(one).all()) for one in values])
