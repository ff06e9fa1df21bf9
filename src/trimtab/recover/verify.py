"""Checks one tensor file of a checkpoint: name, size, header, hash, and which tensor is the first that differs."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from trimtab.core.errors import CheckpointError
from trimtab.recover.disk import DISK, Disk
from trimtab.recover.manifest import MAX_JSON, Damage, Section, parse_json

_BLOCK = 1 << 20


def check_file(path: Path, section: Section, disk: Disk, *, deep: bool) -> Damage | None:
    """What is wrong with the file of `section`; with `deep`, all of it is read."""
    if section.file is None:
        return None
    file = path / section.file
    try:
        info = os.lstat(file)
        if not stat.S_ISREG(info.st_mode):
            return Damage(file=section.file, what="is not a regular file")
        if info.st_size != section.num_bytes:
            what = f"has {info.st_size} bytes instead of {section.num_bytes}"
            return Damage(file=section.file, what=what + _cut(section, info.st_size))
        if deep and _sha256(file, disk) != section.sha256:
            return Damage(file=section.file, what=_first_difference(file, section, disk))
    except OSError as error:
        return Damage(file=section.file, what=reason_of(error, file))
    return None


def check_header(path: Path, section: Section) -> None:
    """Compare the table at the beginning of a tensor file with the manifest, before anything trusts it."""
    with DISK.open(path / str(section.file)) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_JSON, section.num_bytes):
            raise CheckpointError(f"declares a header of {length} bytes in a file of {section.num_bytes}")
        header = parse_json(file.read(length), "its header", section.num_bytes)
    header.pop("__metadata__", None)
    for key, item in section.tensors.items():
        told = header.pop(key, None)
        if not isinstance(told, dict) or (told.get("dtype"), told.get("shape")) != (item.dtype, item.shape):
            raise CheckpointError(f"tensor {key[:80]!r} should be {item.dtype} {item.shape}, its header says {told}")
    if header:
        raise CheckpointError(f"holds tensor {next(iter(header))[:80]!r}, which the manifest does not know")


def reason_of(error: OSError, path: Path) -> str:
    """Why a file cannot be read, without repeating its path."""
    if error.errno == errno.ENOENT:
        return "is missing"
    if error.strerror:
        return f"cannot be read: {error.strerror}"
    return str(error).removeprefix(f"{path} ")


def _sha256(file: Path, disk: Disk) -> str:
    digest = hashlib.sha256()
    for block in _blocks(file, disk):
        digest.update(block)
    return digest.hexdigest()


def _blocks(file: Path, disk: Disk) -> Iterator[memoryview]:
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    with disk.open(file) as opened:
        while count := disk.read_into(opened, buffer, file):
            yield view[:count]


def _ends(section: Section) -> Iterator[tuple[str, int, str]]:
    """Name, end in the file, and mark: of the header, then of each tensor."""
    end = section.num_bytes - sum(item.num_bytes for item in section.tensors.values())
    yield "the header", end, section.header
    for key, item in section.tensors.items():
        end += item.num_bytes
        yield f"tensor {key!r}", end, item.mark


def _first_difference(file: Path, section: Section, disk: Disk) -> str:
    """The hash was noted at the end of each tensor, so the first note that differs tells where the damage begins."""
    digest, position = hashlib.sha256(), 0
    ends = _ends(section)
    name, end, mark = next(ends)
    for block in _blocks(file, disk):
        while len(block) >= end - position:
            digest.update(block[: end - position])
            block, position = block[end - position :], end
            if digest.copy().hexdigest()[:16] != mark:
                return f"{name} is not what was written (the SHA-256 differs)"
            following = next(ends, None)
            if following is None:
                break
            name, end, mark = following
        digest.update(block)
        position += len(block)
    return "the SHA-256 differs from the manifest's"


def _cut(section: Section, size: int) -> str:
    first = next((name for name, end, _ in _ends(section) if end > size), None)
    return f": {first} is cut off" if first is not None else ""
