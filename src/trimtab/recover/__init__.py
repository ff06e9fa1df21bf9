"""Certified checkpoints: what is captured, how it is stored so that nothing is lost, and which one to go back to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.recover.checkpointer import Checkpointer
    from trimtab.recover.documented import load_checkpoint, read_checkpoint, save_checkpoint
    from trimtab.recover.loader import ResumableLoader
    from trimtab.recover.sampler import Quarantine, QuarantineSampler

_HOME = {
    "Checkpointer": "checkpointer",
    "Quarantine": "sampler",
    "QuarantineSampler": "sampler",
    "ResumableLoader": "loader",
    "load_checkpoint": "documented",
    "read_checkpoint": "documented",
    "save_checkpoint": "documented",
}

__all__ = [
    "Checkpointer",
    "Quarantine",
    "QuarantineSampler",
    "ResumableLoader",
    "load_checkpoint",
    "read_checkpoint",
    "save_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        value = getattr(import_module(f"trimtab.recover.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.recover' has no attribute {name!r}")
