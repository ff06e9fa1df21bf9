"""Reads checkpoints, and tells which file and which tensor is damaged where one is."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trimtab.core.errors import CheckpointError
from trimtab.recover import manifest, tree
from trimtab.recover.disk import DISK, Disk
from trimtab.recover.house import size_of
from trimtab.recover.manifest import MANIFEST, MARKER, MAX_JSON, STATUS, Contents, Damage, Manifest, Section
from trimtab.recover.prepare import explaining
from trimtab.recover.status import damage_of_status, get_status
from trimtab.recover.verify import check_file, check_header, reason_of

_MARKER_BYTES = 65
_SIMILAR = 8


@explaining("the checkpoint could not be read")
def read(path: Path, *, verify: bool = True, sections: Collection[str] | None = None, disk: Disk = DISK) -> Contents:
    """Read a checkpoint, or only some `sections` of it; CheckpointError names every damaged file.

    With `verify`, marker, manifest, sizes and the SHA-256 of every file that is needed are checked before anything is
    handed out. Without, only what costs nothing is. Tensors are mapped from the files: they may be changed (the file is
    not), and their values are read from the disk when they are first needed.
    """
    path = Path(path)
    found = inspect(path, disk=disk)
    wanted = dict(found.sections) if sections is None else {name: _section(found, name, path) for name in sections}
    if verify:
        damages = _damages(path, wanted, disk)
        if damages:
            raise _damaged(path, damages)
    state = {name: _load(path, section) for name, section in wanted.items()}
    return Contents(manifest=found, sections=state, status=get_status(path, disk=disk))


def inspect(path: Path, *, disk: Disk = DISK) -> Manifest:
    """The manifest of a checkpoint whose marker, manifest and file sizes are right; CheckpointError otherwise."""
    path = Path(path)
    found, damages = look_at(path, disk=disk)
    if found is None or damages:
        raise _damaged(path, damages)
    return found


def look_at(path: Path, *, disk: Disk = DISK) -> tuple[Manifest | None, tuple[Damage, ...]]:
    """The manifest, if marker and manifest are right, and what is damaged by the sizes of the files."""
    found, damages = _manifest(Path(path), disk)
    if found is None:
        return None, tuple(damages)
    checked = (check_file(Path(path), section, disk, deep=False) for section in found.sections.values())
    return found, tuple(damage for damage in checked if damage is not None)


def damage_of(path: Path, *, disk: Disk = DISK) -> tuple[Damage, ...]:
    """Everything that is wrong with a checkpoint, after reading all of it; empty for a sound one."""
    path = Path(path)
    found, damages = _manifest(path, disk)
    if found is not None:
        damages += _damages(path, found.sections, disk)
    try:
        if lost := damage_of_status(disk.read(path / STATUS, MAX_JSON)):
            damages.append(Damage(file=STATUS, what=lost))
    except OSError as error:
        damages.append(Damage(file=STATUS, what=reason_of(error, path / STATUS)))
    return tuple(damages)


def _manifest(path: Path, disk: Disk) -> tuple[Manifest | None, list[Damage]]:
    if not os.path.isdir(path):
        what = "is no directory" if os.path.lexists(path) else "does not exist"
        return None, [Damage(file=".", what=what)]
    files: dict[str, bytes] = {}
    damages = []
    for name, limit in ((MARKER, _MARKER_BYTES), (MANIFEST, MAX_JSON)):
        try:
            files[name] = disk.read(path / name, limit)
        except OSError as error:
            damages.append(Damage(file=name, what=reason_of(error, path / name)))
    if damages:
        return None, damages
    digest = manifest.digest_of(files[MANIFEST])
    blamed = _blame(files[MARKER], digest)
    if blamed is not None:
        return None, [blamed]
    try:
        return manifest.parse(files[MANIFEST], digest, size_of(path)), []
    except CheckpointError as error:
        return None, [Damage(file=MANIFEST, what=str(error))]


def _blame(marker: bytes, digest: str) -> Damage | None:
    """Which of the two is damaged, if they differ: a changed manifest has a wholly different digest."""
    if marker == f"{digest}\n".encode():
        return None
    text = marker.decode("latin-1").rstrip("\n")
    same = sum(a == b for a, b in zip(text, digest, strict=False))
    if len(marker) != _MARKER_BYTES or same >= len(digest) - _SIMILAR or not manifest.is_digest(text):
        return Damage(file=MARKER, what="is not the SHA-256 that was written")
    return Damage(file=MANIFEST, what=f"its SHA-256 is {digest[:12]}…; {MARKER} has {text[:12]}…")


def _damages(path: Path, sections: Any, disk: Disk) -> list[Damage]:
    filed = [section for section in sections.values() if section.file is not None]
    if not filed:
        return []
    with ThreadPoolExecutor(min(len(filed), os.cpu_count() or 1)) as pool:
        found = pool.map(lambda section: check_file(path, section, disk, deep=True), filed)
        return [damage for damage in found if damage is not None]


def _load(path: Path, section: Section) -> Any:
    tensors: dict[str, Tensor] = {}
    if section.file is not None:
        try:
            check_header(path, section)
            with torch.device("cpu"):  # older releases of safetensors follow the default device
                tensors = load_file(path / section.file)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise _damaged(path, [Damage(file=section.file, what=str(error)[:300])]) from error
    try:
        return tree.unflatten(section.tree, tensors)
    except CheckpointError as error:
        raise _damaged(path, [Damage(file=MANIFEST, what=str(error))]) from error


def _section(found: Manifest, name: str, path: Path) -> Section:
    if name not in found.sections:
        raise CheckpointError(f"{path} has no section {name!r}; it has {', '.join(found.sections) or 'none'}")
    return found.sections[name]


def _damaged(path: Path, damages: Collection[Damage]) -> CheckpointError:
    told = "; ".join(map(str, damages))
    return CheckpointError(f"{path} cannot be used: {told}; use another checkpoint (nothing was loaded)")
