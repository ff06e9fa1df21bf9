"""N-way contrastive losses; imports nothing else of trimtab."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.compat.loss_shims import ClipLoss, Symile, gram_volume_loss, triangle_area_loss
    from trimtab.compat.stable_losses import (
        StableLoss,
        StableLossFunctions,
        get_stable_loss_function,
        replace_loss_function_with_stable_version,
        restore_loss_function,
        soft_clamp,
    )
    from trimtab.losses.backends.dense import nway_logits
    from trimtab.losses.cost import TooCostly, nway_cost
    from trimtab.losses.module import NWayLoss
    from trimtab.losses.nway import NWayOutput, nway_loss

_HOME = {
    "ClipLoss": "trimtab.compat.loss_shims",
    "NWayLoss": "trimtab.losses.module",
    "NWayOutput": "trimtab.losses.nway",
    "StableLoss": "trimtab.compat.stable_losses",
    "StableLossFunctions": "trimtab.compat.stable_losses",
    "Symile": "trimtab.compat.loss_shims",
    "TooCostly": "trimtab.losses.cost",
    "get_stable_loss_function": "trimtab.compat.stable_losses",
    "gram_volume_loss": "trimtab.compat.loss_shims",
    "nway_cost": "trimtab.losses.cost",
    "nway_logits": "trimtab.losses.backends.dense",
    "nway_loss": "trimtab.losses.nway",
    "replace_loss_function_with_stable_version": "trimtab.compat.stable_losses",
    "restore_loss_function": "trimtab.compat.stable_losses",
    "soft_clamp": "trimtab.compat.stable_losses",
    "triangle_area_loss": "trimtab.compat.loss_shims",
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


def __getattr__(name: str) -> object:
    if name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.losses' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
