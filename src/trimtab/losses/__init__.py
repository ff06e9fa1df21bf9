"""N-way contrastive losses; imports nothing else of trimtab."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.losses.logits import nway_logits
    from trimtab.losses.nway import NWayOutput, nway_loss

_HOME = {
    "NWayOutput": "trimtab.losses.nway",
    "nway_logits": "trimtab.losses.logits",
    "nway_loss": "trimtab.losses.nway",
}

__all__ = [
    "NWayOutput",
    "nway_logits",
    "nway_loss",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.losses' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
