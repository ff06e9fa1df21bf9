"""Certified checkpoints: what is captured, how it is stored so that nothing is lost, and which one to go back to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.checkpoint.checkpointer import Checkpointer
    from trimtab.checkpoint.loader import Quarantine, QuarantineSampler, ResumableLoader
    from trimtab.compat.checkpoint_pair import load_checkpoint, read_checkpoint, save_checkpoint

_HOME = {
    "Checkpointer": "trimtab.checkpoint.checkpointer",
    "Quarantine": "trimtab.checkpoint.loader",
    "QuarantineSampler": "trimtab.checkpoint.loader",
    "ResumableLoader": "trimtab.checkpoint.loader",
    "load_checkpoint": "trimtab.compat.checkpoint_pair",
    "read_checkpoint": "trimtab.compat.checkpoint_pair",
    "save_checkpoint": "trimtab.compat.checkpoint_pair",
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


def __getattr__(name: str) -> object:
    if name in _HOME:
        from importlib import import_module

        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.checkpoint' has no attribute {name!r}")
