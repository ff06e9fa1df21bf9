"""Activations, gradient checkpointing, gradient noise and stabilisers; imports nothing else of trimtab."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.compat.nn.activation_comparison import ActivationRow as ActivationRow
    from trimtab.compat.nn.activation_comparison import activation_table as activation_table
    from trimtab.compat.nn.activation_comparison import compare_activations as compare_activations
    from trimtab.compat.nn.gradient_checkpointing import Checkpointed as Checkpointed
    from trimtab.compat.nn.gradient_checkpointing import add_gradient_checkpointing as add_gradient_checkpointing
    from trimtab.compat.nn.gradient_checkpointing import remove_gradient_checkpointing as remove_gradient_checkpointing
    from trimtab.compat.nn.layers import GradientStabilizer as GradientStabilizer
    from trimtab.compat.nn.layers import ImprovedActivations as ImprovedActivations
    from trimtab.compat.nn.layers import add_gradient_noise as add_gradient_noise
    from trimtab.compat.nn.layers import stabilize_layer as stabilize_layer

_NAMES = {
    "nn.activation_comparison": "ActivationRow activation_table compare_activations",
    "nn.gradient_checkpointing": "Checkpointed add_gradient_checkpointing remove_gradient_checkpointing",
    "nn.layers": "GradientStabilizer ImprovedActivations add_gradient_noise stabilize_layer",
}
_HOME = {name: f"trimtab.compat.{module}" for module, names in _NAMES.items() for name in names.split()}
"""Where each name is defined: modules are imported when one of their names is used."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'trimtab.compat.nn' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
