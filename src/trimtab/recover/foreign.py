"""Reads checkpoints that others wrote, without executing anything that is in them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trimtab.core.errors import CheckpointError
from trimtab.core.files import is_hollow, open_regular
from trimtab.recover.manifest import MAX_JSON, parse_json
from trimtab.recover.prepare import explaining
from trimtab.recover.torch_file import Foreign, Refused, TooMuch, read_torch_file

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFE_SUFFIX = ".safetensors"
MAX_TENSORS = 100_000
"""In a small file; a larger one may hold another for each 1,000 bytes."""


@explaining("the file could not be read")
def load_foreign(path: Path | str) -> Any:
    """The contents of a `.pt`, `.pth`, `.bin`, `.ckpt` or `.safetensors` file, on the CPU.

    Only tensors and plain data are read. A file with any other object in it is refused: reading that would mean to run
    code from the file. So is one that asks for far more memory or work than its size accounts for.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2)}, Path(folder) / "old.pth")
        ...     load_foreign(Path(folder) / "old.pth")
        {'w': tensor([1., 1.])}
    """
    path = Path(path)
    _check_place(path)
    suffix = path.suffix.lower()
    if suffix == SAFE_SUFFIX:
        return _load_safe(path)
    if suffix in TORCH_SUFFIXES:
        return _load_torch(path)
    raise CheckpointError(
        f"{path} is no checkpoint by its name: it should end in {', '.join((*TORCH_SUFFIXES, SAFE_SUFFIX))}; "
        "rename it if it is one"
    )


def _check_place(path: Path) -> None:
    """Refuse what is no file: a pipe or a device could be waited for, or read, without an end."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = 0
    if not stat.S_ISREG(mode):
        what = "does not exist" if not mode else "is a directory" if stat.S_ISDIR(mode) else "is not a regular file"
        raise CheckpointError(f"{path} {what}: give a file that ends in {', '.join((*TORCH_SUFFIXES, SAFE_SUFFIX))}")


def _load_safe(path: Path) -> Any:
    try:
        _check_header(path)
        with torch.device("cpu"):  # older releases of safetensors follow the default device
            return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        told = str(error)[:300].removeprefix(f"{path} ")
        raise CheckpointError(f"{path} is not a sound safetensors file: {told}; use another copy") from error


def _check_header(path: Path) -> None:
    """Refuse a table of contents that would cost more than the file is worth, before anybody builds tensors of it."""
    with open_regular(path) as file:
        info = os.fstat(file.fileno())
        length = int.from_bytes(file.read(8), "little")
        if is_hollow(info):
            raise CheckpointError(f"only about {info.st_blocks * 512} of its {info.st_size} bytes were ever written")
        if not 2 <= length <= min(MAX_JSON, info.st_size - 8):
            raise CheckpointError(f"declares a header of {length} bytes in a file of {info.st_size}")
        header = parse_json(file.read(length), "its header", info.st_size)
    if len(header) > MAX_TENSORS + info.st_size // 1000:
        raise CheckpointError(f"names {len(header)} tensors in a file of {info.st_size} bytes")


def _load_torch(path: Path) -> Any:
    try:
        return read_torch_file(path)
    except Foreign as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain data ({error}): it is not read, because that would "
            "run code from the file; if you trust whoever wrote it, load it yourself with "
            "torch.load(..., weights_only=False) and save the state_dict() in it again"
        ) from error
    except TooMuch as error:
        raise CheckpointError(
            f"{path} is not read: {error}; if you trust whoever wrote it, load it yourself with "
            "torch.load(..., weights_only=True) and save what you need of it again"
        ) from error
    except Refused as error:
        raise CheckpointError(f"{path} cannot be read as a torch file: {error}; use another copy") from error
