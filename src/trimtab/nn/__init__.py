"""Activations, gradient checkpointing, gradient noise and stabilisers; imports nothing else of trimtab."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.nn.activations import ImprovedActivations
    from trimtab.nn.checkpointing import Checkpointed, add_gradient_checkpointing, remove_gradient_checkpointing
    from trimtab.nn.compare import ActivationRow, activation_table, compare_activations
    from trimtab.nn.noise import add_gradient_noise
    from trimtab.nn.stabilizer import GradientStabilizer, stabilize_layer

_HOME = {
    "ActivationRow": "compare",
    "activation_table": "compare",
    "compare_activations": "compare",
    "ImprovedActivations": "activations",
    "Checkpointed": "checkpointing",
    "add_gradient_checkpointing": "checkpointing",
    "remove_gradient_checkpointing": "checkpointing",
    "add_gradient_noise": "noise",
    "GradientStabilizer": "stabilizer",
    "stabilize_layer": "stabilizer",
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

        value = getattr(import_module(f"trimtab.nn.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'trimtab.nn' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
