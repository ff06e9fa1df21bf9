"""N-way contrastive losses; imports nothing else of trimtab."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.losses.clamp import soft_clamp
    from trimtab.losses.cost import TooCostly, nway_cost
    from trimtab.losses.logits import nway_logits
    from trimtab.losses.module import NWayLoss
    from trimtab.losses.nway import NWayOutput, nway_loss
    from trimtab.losses.replace import replace_loss_function_with_stable_version, restore_loss_function
    from trimtab.losses.shims import ClipLoss, Symile, gram_volume_loss, triangle_area_loss
    from trimtab.losses.stable import StableLossFunctions
    from trimtab.losses.versions import StableLoss, get_stable_loss_function

_HOME = {
    "ClipLoss": "trimtab.losses.shims",
    "NWayLoss": "trimtab.losses.module",
    "NWayOutput": "trimtab.losses.nway",
    "StableLoss": "trimtab.losses.versions",
    "StableLossFunctions": "trimtab.losses.stable",
    "Symile": "trimtab.losses.shims",
    "TooCostly": "trimtab.losses.cost",
    "get_stable_loss_function": "trimtab.losses.versions",
    "gram_volume_loss": "trimtab.losses.shims",
    "nway_cost": "trimtab.losses.cost",
    "nway_logits": "trimtab.losses.logits",
    "nway_loss": "trimtab.losses.nway",
    "replace_loss_function_with_stable_version": "trimtab.losses.replace",
    "restore_loss_function": "trimtab.losses.replace",
    "soft_clamp": "trimtab.losses.clamp",
    "triangle_area_loss": "trimtab.losses.shims",
}

__all__ = [
    "ClipLoss",
    "NWayLoss",
    "NWayOutput",
    "StableLoss",
    "StableLossFunctions",
    "Symile",
    "TooCostly",
    "get_stable_loss_function",
    "gram_volume_loss",
    "nway_cost",
    "nway_logits",
    "nway_loss",
    "replace_loss_function_with_stable_version",
    "restore_loss_function",
    "soft_clamp",
    "triangle_area_loss",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.losses' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
