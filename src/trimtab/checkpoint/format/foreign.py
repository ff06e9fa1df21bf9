"""Checkpoints that others wrote: read without executing anything in them, and sorted into the sections of ours."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trimtab.checkpoint.directory import explaining
from trimtab.checkpoint.format.manifest import MAX_JSON, parse_json
from trimtab.checkpoint.format.torch_file import Foreign, Refused, TooMuch, read_torch_file
from trimtab.checkpoint.parts import COMPILED, Several, inner_optimizer, labelled, listed
from trimtab.core.errors import CheckpointError
from trimtab.core.files import is_hollow, open_regular

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
SAFE_SUFFIX = ".safetensors"
MAX_TENSORS = 100_000
"""In a small file; a larger one may hold another for each 1,000 bytes."""


@explaining("the file could not be read")
def load_foreign(path: Path | str) -> object:
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


def _load_safe(path: Path) -> dict[str, Tensor]:
    try:
        _check_header(path)
        with torch.device("cpu"):  # older releases of safetensors follow the default device
            return load_file(path)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        why = str(error)[:300].removeprefix(f"{path} ")
        raise CheckpointError(f"{path} is not a sound safetensors file: {why}; use another copy") from error


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


def _load_torch(path: Path) -> object:
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


MODEL = ("model_state_dict", "state_dict", "model", "net", "module")
OPTIMIZER = ("optimizer_state_dict", "optimizer", "optim")
SCHEDULER = ("scheduler_state_dict", "lr_scheduler_state_dict", "scheduler", "lr_scheduler")
PARALLEL = "module."


def sections_of_foreign(
    loaded: object, path: Path, given: Mapping[str, Several] | None = None
) -> dict[str, dict[str, Any]]:
    """The sections in what `load_foreign` read: a state dict, or a dict that has one under a usual name.

    `given` are the optimizer and scheduler it is meant for: such files do not say of which class theirs are.

    Example:
        >>> import torch
        >>> found = sections_of_foreign({"state_dict": {"module.w": torch.ones(1)}, "epoch": 3}, Path("old.pth"))
        >>> found["model"], found["extra"]
        ({'w': tensor([1.])}, {'epoch': 3})
    """
    if not isinstance(loaded, Mapping):
        raise CheckpointError(
            f"{path} holds a {type(loaded).__name__}; expected a state dict, or a dict with one under {listed(MODEL)}"
        )
    if _is_state_dict(loaded):
        return {"model": _plain_names(loaded)}
    under = next((name for name in MODEL if _is_state_dict(loaded.get(name))), None)
    if under is None:
        held = listed(map(str, loaded)) or "nothing"
        raise CheckpointError(f"{path} holds no state dict; expected one under {listed(MODEL)}, found: {held}")
    sections: dict[str, dict[str, Any]] = {"model": _plain_names(loaded[under])}
    used = {under}
    for section, names in (("optimizer", OPTIMIZER), ("scheduler", SCHEDULER)):
        name = next((name for name in names if isinstance(loaded.get(name), Mapping)), None)
        if name is not None:
            used.add(name)
            here = labelled((given or {}).get(section))
            itself = inner_optimizer if section == "optimizer" else lambda one: one
            kind = next((type(itself(one)).__name__ for one in here.values()), "")
            sections[section] = {next(iter(here), "0"): {"class": kind, "state": loaded[name]}}
    sections["extra"] = {str(name): one for name, one in loaded.items() if name not in used}
    return sections


def _is_state_dict(value: object) -> TypeGuard[Mapping[str, object]]:
    """A mapping of names to tensors; a module may keep other things in its state, but no dicts within dicts."""
    if not isinstance(value, Mapping) or not value or not all(isinstance(name, str) for name in value):
        return False
    return any(isinstance(one, Tensor) for one in value.values()) and not any(
        isinstance(one, Mapping) for one in value.values()
    )


def _plain_names(state: Mapping[str, object]) -> dict[str, object]:
    """Names without what `torch.compile` and the data-parallel wrappers add to them."""
    names = [name.replace(COMPILED, "") for name in state]
    prefix = PARALLEL if all(name.startswith(PARALLEL) for name in names) else ""
    return {name.removeprefix(prefix): one for name, one in zip(names, state.values(), strict=True)}
