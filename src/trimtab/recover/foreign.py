"""Reads checkpoints that others wrote, without executing anything that is in them."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from trimtab.core.errors import CheckpointError

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFE_SUFFIX = ".safetensors"


def load_foreign(path: Path | str) -> Any:
    """The contents of a `.pt`, `.pth`, `.bin`, `.ckpt` or `.safetensors` file, on the CPU.

    Only tensors and plain data are read. A file with any other object in it is refused: reading that would mean to run
    code from the file.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     torch.save({"w": torch.ones(2)}, Path(folder) / "old.pth")
        ...     load_foreign(Path(folder) / "old.pth")
        {'w': tensor([1., 1.])}
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise CheckpointError(f"{path} {what}: give a file that ends in {', '.join((*TORCH_SUFFIXES, SAFE_SUFFIX))}")
    suffix = path.suffix.lower()
    if suffix == SAFE_SUFFIX:
        return _load_safe(path)
    if suffix in TORCH_SUFFIXES:
        return _load_torch(path)
    raise CheckpointError(
        f"{path} is no checkpoint by its name: it should end in {', '.join((*TORCH_SUFFIXES, SAFE_SUFFIX))}; "
        "rename it if it is one"
    )


def _load_safe(path: Path) -> Any:
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path} is not a sound safetensors file: {str(error)[:300]}; use another copy"
        ) from error


def _load_torch(path: Path) -> Any:
    try:
        # Only files in the zip format can be mapped; those of torch before 1.6 are read as a whole.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors and plain data ({_first_line(error)}): it is not read, because that would "
            "run code from the file; if you trust whoever wrote it, load it yourself with "
            "torch.load(..., weights_only=False) and save the state_dict() in it again"
        ) from error
    except Exception as error:  # a torn or foreign file makes torch raise almost anything
        raise CheckpointError(
            f"{path} cannot be read as a torch file: {_first_line(error)}; use another copy"
        ) from error


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
