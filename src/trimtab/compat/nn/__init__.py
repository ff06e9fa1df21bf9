"""Activations, gradient checkpointing, gradient noise and stabilisers; imports nothing else of trimtab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.compat.nn.activation_comparison import ActivationRow, activation_table, compare_activations
    from trimtab.compat.nn.gradient_checkpointing import (
        Checkpointed,
        add_gradient_checkpointing,
        remove_gradient_checkpointing,
    )
    from trimtab.compat.nn.layers import GradientStabilizer, ImprovedActivations, add_gradient_noise, stabilize_layer

_HOME = {
    "ActivationRow": "trimtab.compat.nn.activation_comparison",
    "activation_table": "trimtab.compat.nn.activation_comparison",
    "compare_activations": "trimtab.compat.nn.activation_comparison",
    "ImprovedActivations": "trimtab.compat.nn.layers",
    "Checkpointed": "trimtab.compat.nn.gradient_checkpointing",
    "add_gradient_checkpointing": "trimtab.compat.nn.gradient_checkpointing",
    "remove_gradient_checkpointing": "trimtab.compat.nn.gradient_checkpointing",
    "add_gradient_noise": "trimtab.compat.nn.layers",
    "GradientStabilizer": "trimtab.compat.nn.layers",
    "stabilize_layer": "trimtab.compat.nn.layers",
}

__all__ = [
    "ActivationRow",
    "Checkpointed",
    "GradientStabilizer",
    "ImprovedActivations",
    "activation_table",
    "add_gradient_checkpointing",
    "add_gradient_noise",
    "compare_activations",
    "remove_gradient_checkpointing",
    "stabilize_layer",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        from importlib import import_module

        value = getattr(import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.compat.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
