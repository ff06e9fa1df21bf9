"""trimtab keeps PyTorch training on course. Importing it does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.core.config import Clip, Config
    from trimtab.core.errors import (
        AttachError,
        ConfigError,
        InputError,
        RecordError,
        TrainingStopped,
        TrimtabError,
    )
    from trimtab.core.types import Finding, Severity, Verdict
    from trimtab.guard import Guard

__version__ = "0.1.0"

_HOME = {
    "Guard": "trimtab.guard",
    "Config": "trimtab.core.config",
    "Clip": "trimtab.core.config",
    "Finding": "trimtab.core.types",
    "Severity": "trimtab.core.types",
    "Verdict": "trimtab.core.types",
    "TrimtabError": "trimtab.core.errors",
    "ConfigError": "trimtab.core.errors",
    "InputError": "trimtab.core.errors",
    "AttachError": "trimtab.core.errors",
    "RecordError": "trimtab.core.errors",
    "TrainingStopped": "trimtab.core.errors",
}

__all__ = [
    "AttachError",
    "Clip",
    "Config",
    "ConfigError",
    "Finding",
    "Guard",
    "InputError",
    "RecordError",
    "Severity",
    "TrainingStopped",
    "TrimtabError",
    "Verdict",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
