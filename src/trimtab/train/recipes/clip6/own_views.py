"""A user's own samples of 2 to 6 modalities, some of which may be missing: captions, rows of files and texts, arrays.

- a folder with pictures and COCO's `captions_*.json` (also in `annotations`): a picture and up to five captions;
- a file of rows (`.csv`, `.jsonl`, `.parquet`), or a folder with one: a column per modality, each cell a text, the name
  of a file, or (JSON lines) a list of numbers; blank where it is missing; a column `split` of train, val, test;
- an `.npz`, or a folder of `.npy`: an array per modality, the same number of samples in each; `held_out` says which
  samples no training may see, `present` `[samples, modalities]` or NaN in a whole sample what is missing.
"""

from __future__ import annotations

import json
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import instead_of
from trimtab.train.data_problems import DataError, refuse
from trimtab.train.own_data.modalities import (
    DEPTH,
    DEPTH_NAMES,
    IMAGE,
    KINDS,
    SERIES,
    SOUNDS,
    TEXT,
    VECTOR,
    ArrayColumn,
    Modality,
    PictureColumn,
    SeriesFiles,
    TextColumn,
    ViewColumn,
    kind_of_shape,
)
from trimtab.train.own_data.picture_files import ARRAYS, PICTURES, PictureFiles, find_picture, need_decoder
from trimtab.train.own_data.row_files import (
    ENDINGS,
    PARTS,
    TEST,
    TRAIN,
    VAL,
    RowFile,
    is_blank,
    named_like_a_split,
    parts_of,
    read_rows,
)

FEWEST, MOST = 2, 6
HELD_OUT = 0.15
MOSTLY = 0.9
MOST_CAPTIONS = 5
PRESENT, HELD = "present", "held_out"


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How samples are read: the side of pictures, the width of texts, and which modalities, of which kinds."""

    side: int
    width: int
    seed: int
    modalities: str = ""

    @property
    def kinds(self) -> dict[str, str | None]:
        """The modalities that were asked for, in their order, with the kind of each if it was given."""
        found: dict[str, str | None] = {}
        for one in filter(None, (part.strip() for part in self.modalities.split(","))):
            name, _, kind = one.partition("=")
            if kind and kind not in KINDS:
                raise InputError(f"modalities: {name!r} is {kind!r}; {instead_of(kind, KINDS)}")
            found[name.strip()] = kind.strip() or None
        return found


def collate_views(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch by names; without `present` where nothing is missing in it."""
    batch: dict[str, Tensor] = default_collate(samples)
    if PRESENT in batch and bool(batch[PRESENT].all()):
        del batch[PRESENT]
    return batch


class ViewSet(Dataset[dict[str, Tensor]]):
    """Some of the samples: a tensor for each modality by its name, and `present` where some may be missing."""

    def __init__(self, columns: Sequence[ViewColumn], rows: Sequence[int], *, whole: bool) -> None:
        self.columns, self.rows, self._whole = tuple(columns), list(rows), whole

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        found = {
            one.modality.name: one[row] if one.present[row] else torch.zeros(one.modality.shape) for one in self.columns
        }
        if not self._whole:
            found[PRESENT] = torch.tensor([bool(one.present[row]) for one in self.columns])
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnViews:
    """The modalities, the samples of each part, whether none lacks a modality, and lines for people."""

    columns: tuple[ViewColumn, ...]
    parts: Mapping[str, ViewSet]
    whole: bool
    lines: tuple[str, ...]

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What each tower gets."""
        return tuple(one.modality for one in self.columns)

    def problems(self) -> Iterator[str]:
        """Everything that cannot be read, with file and row."""
        for one in self.columns:
            yield from one.problems()


def read_views(data: str, how: How) -> OwnViews:
    """Read the samples at a path, in whichever of the layouts; DataError with file and row for what is wrong."""
    path = Path(data)
    if not path.exists():
        raise InputError(f"there is no {data!r}; expected {_layouts()}")
    arrays = list(path.glob("*.npz")) if path.is_dir() else []
    if path.is_file() and path.name.startswith("captions") and path.suffix == ".json":
        root = path.parent.parent if path.parent.name == "annotations" else path.parent
        columns, parts, places = _coco(root, [path], how)
    elif path.is_dir() and (captions := _caption_files(path)):
        columns, parts, places = _coco(path, captions, how)
    elif (file := _row_file(path)) is not None:
        columns, parts, places = _rows(file, how)
    elif path.suffix.lower() == ".npz" or (path.is_dir() and any(path.glob("*.npy"))):
        columns, parts, places = _arrays(path, how)
    elif len(arrays) == 1:
        columns, parts, places = _arrays(arrays[0], how)
    else:
        there = ", ".join(sorted(one.name for one in path.iterdir())[:6]) if path.is_dir() else path.suffix
        raise InputError(f"{path} is not a data set: it holds {there or 'nothing'}; expected {_layouts()}")
    return _finished(path, columns, parts, places, how.seed)


def _layouts() -> str:
    return (
        "a folder with pictures and captions_*.json, a file of rows (.csv, .jsonl) with a column per modality, an .npz "
        "with an array per modality, or a folder of .npy"
    )


def _finished(
    path: Path, columns: Sequence[ViewColumn], parts: Sequence[str] | None, places: Sequence[str], seed: int
) -> OwnViews:
    if not FEWEST <= len(columns) <= MOST:
        listed = ", ".join(one.modality.name for one in columns) or "none"
        raise InputError(
            f"{path} has {len(columns)} modalities ({listed}); expected {FEWEST} to {MOST}: choose some with "
            "--modalities, for example --modalities image,caption=text"
        )
    present = np.stack([one.present for one in columns], axis=1)
    names = [one.modality.name for one in columns]
    few = np.flatnonzero(present.sum(1) < FEWEST)
    refuse(f"{places[i]}: {_lacking(names, present[i])}" for i in few.tolist())
    said = "as given"
    if parts is None or VAL not in parts:
        at = [i for i in range(len(present)) if parts is None or parts[i] == TRAIN]
        held = set(_drawn(at, seed))
        parts = [VAL if i in held else (TRAIN if parts is None else parts[i]) for i in range(len(present))]
        said = f"{HELD_OUT:.0%} held out by seed {seed}"
    rows = {part: [i for i, one in enumerate(parts) if one == part] for part in (TRAIN, VAL, TEST)}
    if len(rows[TRAIN]) < FEWEST or len(rows[VAL]) < FEWEST:
        raise InputError(
            f"{path} has {len(rows[TRAIN])} samples to train on and {len(rows[VAL])} to validate on; expected at least "
            f"{FEWEST} of each"
        )
    for one in columns:
        one.fit(rows[TRAIN])
    whole = bool(present.all())
    sets = {part: ViewSet(columns, at, whole=whole) for part, at in rows.items() if at}
    kinds = ", ".join(f"{m.name} ({m.kind} {'x'.join(map(str, m.shape))})" for m in (c.modality for c in columns))
    sizes = ", ".join(f"{len(at)} {part}" for part, at in rows.items() if at)
    lines = [f"{path}: {sizes} samples ({said})", f"{len(columns)} modalities: {kinds}"]
    if not whole:
        missing = ", ".join(
            f"{n} {int((~present[:, i]).sum())}" for i, n in enumerate(names) if not present[:, i].all()
        )
        lines.append(f"missing: {missing}; {int(present.all(1).sum())} of {len(present)} samples have all modalities")
    return OwnViews(columns=tuple(columns), parts=sets, whole=whole, lines=tuple(lines))


def _lacking(names: Sequence[str], there: NDArray[np.bool_]) -> str:
    lost = [name for name, known in zip(names, there, strict=True) if not known]
    return f"{', '.join(lost)} missing; expected at least {FEWEST} of {', '.join(names)}"


def _drawn(rows: Sequence[int], seed: int) -> list[int]:
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    return [rows[i] for i in order[: max(round(HELD_OUT * len(rows)), FEWEST)]]


# -- COCO --------------------------------------------------------------------------------------------------------------


def _caption_files(folder: Path) -> list[Path]:
    return sorted({*folder.glob("captions*.json"), *folder.glob("annotations/captions*.json")})


def _coco(folder: Path, files: Sequence[Path], how: How) -> tuple[list[ViewColumn], list[str] | None, list[str]]:
    folders = [folder, folder / "images", *sorted(one for one in folder.rglob("*") if one.is_dir())]
    paths, places, parts, problems = list[Path](), list[str](), list[str](), list[str]()
    captions: list[list[str]] = []
    for file in files:
        given = _coco_json(file)
        said: defaultdict[object, list[str]] = defaultdict(list)
        known = {one.get("id") for one in given["images"]}
        for number, one in enumerate(given["annotations"], start=1):
            if one.get("image_id") not in known:
                problems.append(f"{file}, annotation {number}: no image has the id {one.get('image_id')!r}")
            elif not is_blank(one.get("caption")):
                said[one["image_id"]].append(str(one["caption"]))
        for number, image in enumerate(given["images"], start=1):
            name, place = str(image.get("file_name", "")), f"{file}, image {number} (id {image.get('id')})"
            path = find_picture(name, folders) if name else None
            if path is None:
                problems.append(f"{place}: there is no picture {name!r} below {folder}")
            if not said[image.get("id")]:
                problems.append(f"{place}: {name!r} has no caption; expected at least one annotation of it")
            paths.append(path or folder)
            places.append(place)
            captions.append(said[image.get("id")][:MOST_CAPTIONS])
            parts.append(next((PARTS[p] for p in ("train", "val", "test") if p in file.stem.lower()), TRAIN))
    refuse(problems)
    need_decoder(paths)
    most = max((len(one) for one in captions), default=1)
    names = ["caption", *(f"caption_{i}" for i in range(2, most + 1))]
    asked = how.kinds or dict.fromkeys(["image", *names])
    columns: list[ViewColumn] = []
    for name in asked:
        if name == "image":
            pictures = PictureFiles(paths, places, side=how.side)
            refuse(pictures.problems(every=False))
            columns.append(PictureColumn("image", IMAGE, pictures, range(len(paths))))
        elif name in names:
            at = names.index(name)
            columns.append(TextColumn(name, [one[at] if at < len(one) else "" for one in captions], how.width))
        else:
            raise InputError(f"modalities: {name!r}; {instead_of(name, ['image', *names])}")
    return columns, parts if len(set(parts)) > 1 else None, places


def _coco_json(file: Path) -> dict[str, list[dict[str, Any]]]:
    try:
        given = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read as JSON: {str(error)[:160]}") from None
    for key in ("images", "annotations"):
        if not isinstance(given, dict) or not isinstance(given.get(key), list):
            raise DataError(f"{file} has no list {key!r}; expected the layout of COCO: images and annotations")
        for number, one in enumerate(given[key], start=1):
            if not isinstance(one, dict):
                raise DataError(f"{file}, {key} {number}: a {type(one).__name__}; expected an object")
    return {key: given[key] for key in ("images", "annotations")}


# -- rows --------------------------------------------------------------------------------------------------------------


def _row_file(path: Path) -> Path | None:
    if path.is_file():
        return path if path.suffix.lower() in ENDINGS else None
    endings = [one for one in ENDINGS if one != ".txt" or not any(path.glob("*.np[yz]"))]  # beside arrays a readme
    found = sorted(one for one in path.iterdir() if one.suffix.lower() in endings and one.name[0] != ".")
    named = [one for one in found if one.stem.lower() in ("captions", "metadata", "data", "pairs", "samples")]
    return found[0] if len(found) == 1 else named[0] if named else None


def _rows(file: Path, how: How) -> tuple[list[ViewColumn], list[str] | None, list[str]]:
    rows = read_rows(file)
    divided = named_like_a_split(rows)
    asked = how.kinds or dict.fromkeys(name for name in rows.columns if name != divided)
    columns: list[ViewColumn] = []
    for name, kind in asked.items():
        cells = rows.column(name, "a modality")
        found = kind or _kind_of_cells(name, cells, rows)
        if found is not None:
            columns.append(_column(name, found, cells, rows, how))
    return columns, None if divided is None else parts_of(rows, divided), [rows.where(i) for i in range(len(rows))]


def _kind_of_cells(name: str, cells: Iterable[object], rows: RowFile) -> str | None:
    """What a column holds; None for one that is no modality: numbers, or nothing."""
    there = [cell for cell in cells if not is_blank(cell)]
    if not there:
        return None
    if isinstance(there[0], list):
        try:
            return kind_of_shape(name, np.asarray(there[0]).shape, rows.path)
        except ValueError:  # rows of several lengths: named with their row when they are read
            return VECTOR
    endings = Counter(Path(str(cell)).suffix.lower() for cell in there if len(str(cell)) < 1024)
    ending, num = endings.most_common(1)[0] if endings else ("", 0)
    pictures = sum(endings[one] for one in PICTURES)
    if pictures >= MOSTLY * len(there):
        return DEPTH if any(word in name.lower() for word in DEPTH_NAMES) else IMAGE
    if ending in SOUNDS and num >= MOSTLY * len(there):
        return SERIES
    if ending in ARRAYS and num >= MOSTLY * len(there):
        first = find_picture(str(there[0]), _folders(rows))
        return None if first is None else kind_of_shape(name, np.load(first, allow_pickle=False).shape, rows.path)
    return None if all(_is_number(cell) for cell in there) else TEXT


def _is_number(cell: object) -> bool:
    try:
        float(cell)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _folders(rows: RowFile) -> tuple[Path, ...]:
    return rows.path.parent, rows.path.parent / "images"


def _column(name: str, kind: str, cells: Sequence[object], rows: RowFile, how: How) -> ViewColumn:
    if kind == TEXT:
        return TextColumn(name, ["" if is_blank(cell) else str(cell) for cell in cells], how.width)
    if any(isinstance(cell, list) for cell in cells):
        return ArrayColumn(name, _stacked(name, cells, rows), kind, rows.path)
    paths: list[Path | None] = []
    problems: list[str] = []
    for i, cell in enumerate(cells):
        path = None if is_blank(cell) else find_picture(str(cell).strip(), _folders(rows))
        if path is None and not is_blank(cell):
            problems.append(f"{rows.where(i, name)}: there is no file {str(cell)!r}; expected the name of one")
        paths.append(path)
    refuse(problems)
    places = [rows.where(i, name) for i in range(len(rows))]
    if kind == SERIES:
        made = SeriesFiles(name, paths, places, 0)
        refuse(made.problems())
        return made
    if kind not in (IMAGE, DEPTH):
        return ArrayColumn(name, _stacked_files(name, paths, places), kind, rows.path)
    there = [(i, path) for i, path in enumerate(paths) if path is not None]
    need_decoder([path for _, path in there])
    number = {i: n for n, (i, _) in enumerate(there)}
    planes = 1 if kind == DEPTH else 3
    files = PictureFiles([p for _, p in there], [places[i] for i, _ in there], side=how.side, planes=planes)
    refuse(files.problems(every=False))
    return PictureColumn(name, kind, files, [number.get(i, -1) for i in range(len(paths))])


def _stacked(name: str, cells: Sequence[object], rows: RowFile) -> NDArray[np.float32]:
    """Lists of numbers as one array; a missing one is NaN throughout."""
    made: list[NDArray[np.float32] | None] = []
    problems: list[str] = []
    for i, cell in enumerate(cells):
        try:
            made.append(None if is_blank(cell) else np.asarray(cell, dtype=np.float32))
        except (TypeError, ValueError) as error:
            problems.append(f"{rows.where(i, name)}: {error}; expected a list of numbers")
            made.append(None)
    return _one_array(made, [rows.where(i, name) for i in range(len(rows))], problems)


def _stacked_files(name: str, paths: Sequence[Path | None], places: Sequence[str]) -> NDArray[np.float32]:
    made: list[NDArray[np.float32] | None] = []
    problems: list[str] = []
    for path, place in zip(paths, places, strict=True):
        try:
            made.append(None if path is None else np.asarray(np.load(path, allow_pickle=False), dtype=np.float32))
        except (OSError, ValueError, EOFError) as error:
            problems.append(f"{place}: {path} cannot be read as an array ({str(error)[:120]})")
            made.append(None)
    return _one_array(made, places, problems)


def _one_array(
    made: Sequence[NDArray[np.float32] | None], places: Sequence[str], problems: list[str]
) -> NDArray[np.float32]:
    shape = (
        Counter(one.shape for one in made if one is not None).most_common(1)[0][0]
        if any(one is not None for one in made)
        else ()
    )
    for one, place in zip(made, places, strict=True):
        if one is not None and one.shape != shape:
            problems.append(f"{place}: numbers of shape {list(one.shape)}; expected {list(shape)}, as in other rows")
        elif one is not None and not np.isfinite(one).all():
            problems.append(f"{place}: NaN or Inf; expected finite numbers")
    refuse(problems)
    return np.stack([np.full(shape, np.nan, np.float32) if one is None else one for one in made])


# -- arrays ------------------------------------------------------------------------------------------------------------


def _arrays(path: Path, how: How) -> tuple[list[ViewColumn], list[str] | None, list[str]]:
    arrays = _loaded(path)
    held, mask = arrays.pop(HELD, None), arrays.pop(PRESENT, None)
    kinds = how.kinds
    for name in kinds:
        if name not in arrays:
            raise InputError(f"modalities: {path} has no array {name!r}; {instead_of(name, arrays)}")
    names = list(kinds or arrays)
    sizes = {name: len(arrays[name]) if arrays[name].ndim else 0 for name in names}
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"{path}: the arrays have {', '.join(f'{num} ({name})' for name, num in sizes.items())} samples; expected "
            "the same number in each"
        )
    num = next(iter(sizes.values()), 0)
    columns: list[ViewColumn] = []
    for name in names:
        values = arrays[name]
        if values.dtype.kind in "US" or kinds.get(name) == TEXT:
            columns.append(TextColumn(name, [str(one) for one in values.tolist()], how.width))
        elif values.dtype.kind not in "buif" or values.ndim < 2:
            raise DataError(f"{path}: {name!r} is {values.dtype} {list(values.shape)}; expected numbers [samples, ...]")
        else:
            columns.append(ArrayColumn(name, values, kinds.get(name), path))
    if mask is not None:
        if mask.shape != (num, len(columns)):
            raise DataError(f"{path}: present is {list(mask.shape)}; expected [{num}, {len(columns)}]")
        for i, one in enumerate(columns):
            one.present = one.present & mask[:, i].astype(bool)
    refuse(problem for one in columns for problem in one.problems())
    if held is not None and held.shape != (num,):
        raise DataError(f"{path}: held_out is {list(held.shape)}; expected [{num}], one for each sample")
    parts = None if held is None else [VAL if one else TRAIN for one in held.astype(bool).tolist()]
    return columns, parts, [f"{path}, row {i + 1}" for i in range(num)]


def _loaded(path: Path) -> dict[str, NDArray[Any]]:
    if path.is_dir():
        found = {}
        for file in sorted(one for one in path.glob("*.npy") if one.name[0] != "."):
            try:
                found[file.stem] = np.load(file, mmap_mode="r", allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise DataError(f"{file} cannot be read as an array ({str(error)[:160]}); write it again") from None
        return found
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as arrays ({str(error)[:160]}); write it again") from None
