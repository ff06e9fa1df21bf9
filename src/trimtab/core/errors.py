"""Every error trimtab raises on purpose.

    TrimtabError
    ├── ConfigError      a setting that is unknown or out of range        (also ValueError)
    ├── InputError       a model, optimizer, loss or argument that cannot work   (also ValueError)
    ├── AttachError      a guard that cannot be attached, or already is   (also RuntimeError)
    ├── RecordError      a run directory that cannot be read              (also OSError)
    ├── CheckpointError  a checkpoint that cannot be written or read      (also OSError)
    └── TrainingStopped  the run was stopped for its health               (also ValueError)

Each message says what happened, the value, what was expected and what to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.core.printable import printable

if TYPE_CHECKING:
    from trimtab.core.types import Verdict


class TrimtabError(Exception):
    """Root of every error raised by trimtab on purpose. Its message may quote a file, and is safe to print."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(TrimtabError, ValueError):
    """A setting is unknown, of the wrong type, or out of range."""


class InputError(TrimtabError, ValueError):
    """A model, optimizer, loss or argument cannot work; nothing was changed."""


class AttachError(TrimtabError, RuntimeError):
    """A guard cannot be attached here, usually because one already is."""


class RecordError(TrimtabError, OSError):
    """A run directory is missing, foreign or damaged beyond reading."""


class CheckpointError(TrimtabError, OSError):
    """A checkpoint cannot be written, read, or put into these objects; what was there before is as it was."""


class MissingPackageError(TrimtabError, ImportError):
    """An integration needs a package that is not installed; the message says how to install it."""


class TrainingStopped(TrimtabError, ValueError):  # ValueError: what the documented trainers raise on NaN/Inf
    """The run was stopped for its health; `verdict` holds the findings that led to it.

    Example:
        >>> from trimtab import TrainingStopped
        >>> try:
        ...     raise TrainingStopped("Training stopped due to NaN/Inf loss.")
        ... except ValueError as stop:
        ...     print(stop)
        Training stopped due to NaN/Inf loss.
    """

    def __init__(self, message: str, verdict: Verdict | None = None) -> None:
        super().__init__(message)
        self.verdict = verdict
