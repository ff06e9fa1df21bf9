"""What is in a checkpoint, as a table of contents: read from its manifest alone, or from a file of others."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.core.errors import CheckpointError
from trimtab.core.types import Snapshot
from trimtab.recover import health
from trimtab.recover.compare import joined
from trimtab.recover.foreign import load_foreign
from trimtab.recover.manifest import Section
from trimtab.recover.prepare import explaining
from trimtab.recover.survey import look
from trimtab.recover.tensors import SAFE_NAMES

_DTYPES = {name: str(dtype).removeprefix("torch.") for dtype, name in SAFE_NAMES.items()}
_MOMENT = re.compile(r"(.+)\.state\.state\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorRow:
    """One tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRow:
    """One part of the state, and its tensors."""

    name: str
    num_bytes: int
    tensors: tuple[TensorRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The contents of one checkpoint; of a foreign file there is no snapshot."""

    path: Path
    snapshot: Snapshot | None
    created: float | None
    writer: str
    num_bytes: int
    sections: tuple[SectionRow, ...]
    meta: Mapping[str, Any] = field(default_factory=dict)
    nonfinite: tuple[str, ...] = ()
    """Tensors of a foreign file that hold a NaN or an Inf; ours are looked at when they are saved."""


@explaining("the checkpoint could not be shown")
def sheet_of(path: Path) -> Sheet:
    """The contents of a checkpoint of ours; CheckpointError where its manifest cannot be read."""
    seen, manifest = look(path)
    if manifest is None or seen.damaged:
        raise CheckpointError(f"{path} cannot be used: {seen.snapshot.reason}")
    return Sheet(
        path=path,
        snapshot=seen.snapshot,
        created=manifest.created,
        writer=manifest.writer,
        num_bytes=seen.num_bytes,
        sections=tuple(_row(name, section) for name, section in manifest.sections.items()),
        meta=manifest.meta,
    )


@explaining("the file could not be shown")
def sheet_of_foreign(path: Path) -> Sheet:
    """The contents of a `.pt`, `.pth` or `.safetensors` file; nothing in it is executed."""
    loaded = load_foreign(path)
    rows = [_foreign_row("", loaded)]
    if isinstance(loaded, Mapping) and not any(isinstance(one, Tensor) for one in loaded.values()):
        rows = [_foreign_row(str(name), one) for name, one in loaded.items()]
    return Sheet(
        path=path,
        snapshot=None,
        created=None,
        writer="",
        num_bytes=path.stat().st_size,
        sections=tuple(rows),
        nonfinite=tuple(name.removeprefix("model.") for name in health.nonfinite({"model": loaded})),
    )


def tensor_names(section: Section) -> dict[str, str]:
    """Names for people: `exp_avg.layer.weight` instead of `0.state.state.3.exp_avg`."""
    parameters: dict[str, dict[str, str]] = {}
    return {key: _name(key, section.tree, parameters) for key in section.tensors}


def _name(key: str, tree: Any, parameters: dict[str, dict[str, str]]) -> str:
    found = _MOMENT.fullmatch(key)
    if found is None:
        return key
    label, index, moment = found.groups()
    if label not in parameters:
        parameters[label] = _parameter_names(label, tree)
    name = parameters[label].get(index)
    if name is None:  # not an optimizer of torch
        return key
    return f"{moment}.{name}" if len(tree) == 1 else f"{label}.{moment}.{name}"


def _parameter_names(label: str, tree: Any) -> dict[str, str]:
    """The names of the parameters of one optimizer by their number."""
    names: dict[str, str] = {}
    try:
        entry = tree[label]
        for group, told in zip(entry["state"]["param_groups"], entry["names"], strict=True):
            for number, name in zip(group["params"], told, strict=True):
                names[str(number)] = str(name) or str(number)
    except (KeyError, TypeError, ValueError):
        return {}
    return names


def _row(name: str, section: Section) -> SectionRow:
    names = tensor_names(section)
    rows = tuple(
        TensorRow(name=names[key], dtype=_DTYPES[one.dtype], shape=tuple(one.shape), num_bytes=one.num_bytes)
        for key, one in section.tensors.items()
    )
    return SectionRow(name=name, num_bytes=section.num_bytes, tensors=rows)


def _foreign_row(name: str, value: Any) -> SectionRow:
    rows: list[TensorRow] = []
    _gather("", value, rows, 0)
    return SectionRow(name=name, num_bytes=sum(row.num_bytes for row in rows), tensors=tuple(rows))


def _gather(path: str, value: Any, rows: list[TensorRow], depth: int) -> None:
    if depth > 50:
        raise CheckpointError("it is nested more than 50 deep: whatever it is, it is no checkpoint")
    if isinstance(value, Tensor):
        dtype, size = str(value.dtype).removeprefix("torch."), value.numel() * value.element_size()
        rows.append(TensorRow(name=path or "(the whole)", dtype=dtype, shape=tuple(value.shape), num_bytes=size))
    elif isinstance(value, Mapping):
        for key, one in value.items():
            _gather(joined(path, key), one, rows, depth + 1)
    elif isinstance(value, list | tuple):
        for index, one in enumerate(value):
            _gather(joined(path, index), one, rows, depth + 1)
