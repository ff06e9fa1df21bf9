"""trimtab keeps PyTorch training on course. Importing it does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trimtab.aliases import NAMESPACES, install
from trimtab.core.printable import make_log_printable

if TYPE_CHECKING:
    from trimtab.checkpoint.checkpointer import Checkpointer
    from trimtab.compat.monitors.activation_monitor import ActivationMonitor
    from trimtab.compat.monitors.diagnostics import GradientDiagnostics
    from trimtab.compat.monitors.gradient_monitor import GradientHealthMonitor
    from trimtab.compat.monitors.training_health import TrainingHealthMonitor
    from trimtab.core.config import Clip, Config
    from trimtab.core.errors import (
        AttachError,
        CheckpointError,
        ConfigError,
        InputError,
        RecordError,
        TrainingStopped,
        TrimtabError,
    )
    from trimtab.core.types import Finding, Severity, Verdict
    from trimtab.guard.guard import Guard
    from trimtab.integrations.loggers.histogram_log import log_histograms
    from trimtab.record.reader import Run
    from trimtab.train.trainer import Trainer

__version__ = "0.1.0"

make_log_printable()
install()

_HOME = {
    "Guard": "trimtab.guard.guard",
    "GradientHealthMonitor": "trimtab.compat.monitors.gradient_monitor",
    "ActivationMonitor": "trimtab.compat.monitors.activation_monitor",
    "GradientDiagnostics": "trimtab.compat.monitors.diagnostics",
    "TrainingHealthMonitor": "trimtab.compat.monitors.training_health",
    "Checkpointer": "trimtab.checkpoint.checkpointer",
    "Config": "trimtab.core.config",
    "Clip": "trimtab.core.config",
    "Finding": "trimtab.core.types",
    "Run": "trimtab.record.reader",
    "Severity": "trimtab.core.types",
    "Verdict": "trimtab.core.types",
    "TrimtabError": "trimtab.core.errors",
    "ConfigError": "trimtab.core.errors",
    "InputError": "trimtab.core.errors",
    "AttachError": "trimtab.core.errors",
    "RecordError": "trimtab.core.errors",
    "CheckpointError": "trimtab.core.errors",
    "TrainingStopped": "trimtab.core.errors",
    "Trainer": "trimtab.train.trainer",
    "log_histograms": "trimtab.integrations.loggers.histogram_log",
}

_PACKAGES = (
    *("checkpoint", "compat", "core", "data", "doctor", "guard", "integrations", "losses", "record", "report"),
    *("rules", "train"),
    *("checks", "monitor", "nn", "recover"),  # under their earlier names
)
"""Imported when they are first asked for, as in `trimtab.checkpoint.ResumableLoader`."""

__all__ = [
    "ActivationMonitor",
    "AttachError",
    "CheckpointError",
    "Checkpointer",
    "Clip",
    "Config",
    "ConfigError",
    "Finding",
    "GradientDiagnostics",
    "GradientHealthMonitor",
    "Guard",
    "InputError",
    "RecordError",
    "Run",
    "Severity",
    "Trainer",
    "TrainingHealthMonitor",
    "TrainingStopped",
    "TrimtabError",
    "Verdict",
    "__version__",
    "log_histograms",
]


def __getattr__(name: str) -> Any:
    if f"trimtab.{name}" in NAMESPACES:
        from importlib import import_module

        return import_module(NAMESPACES[f"trimtab.{name}"])
    if name in _HOME:
        from importlib import import_module

        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    if name in _PACKAGES:
        from importlib import import_module

        return import_module(f"trimtab.{name}")
    raise AttributeError(f"module 'trimtab' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
