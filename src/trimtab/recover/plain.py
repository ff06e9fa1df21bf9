"""Settings as plain data: what a checkpoint may hold without anybody's class being needed to read it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any


def as_plain(value: Any) -> Any:
    """Turn dataclasses, namespaces, named tuples, enums and paths into dicts and plain values, however deep.

    Everything else stays as it is; what cannot be stored is refused when it is written, with its path.

    Example:
        >>> as_plain(SimpleNamespace(lr=0.1, out=PurePath("runs/a"), betas=(0.9, 0.99)))
        {'lr': 0.1, 'out': 'runs/a', 'betas': (0.9, 0.99)}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        return {name: as_plain(one) for name, one in vars(value).items()}
    if isinstance(value, Mapping):
        return {as_plain(name): as_plain(one) for name, one in value.items()}
    if isinstance(value, Enum):
        return as_plain(value.value)
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return as_plain(value._asdict())
    if type(value) in (list, tuple):
        return type(value)(as_plain(one) for one in value)
    return value
