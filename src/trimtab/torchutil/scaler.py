"""What a GradScaler knows, read without disturbing it."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def scale_of(scaler: Any) -> float | Tensor | None:
    """The current loss scale; None where there is no scaler or it is switched off."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale: Tensor | None = getattr(scaler, "_scale", None)
    if isinstance(scale, Tensor):
        return scale.clone()  # update() changes it in place while the sample is still under way
    return float(scaler.get_scale())  # before the first scale() it is a plain number


def unscale(scaler: Any, optimizer: Any) -> None:
    """Unscale once: a loop that already did so for its own clipping is left alone."""
    states = getattr(scaler, "_per_optimizer_states", None)
    if states is not None and id(optimizer) in states and states[id(optimizer)]["stage"].name != "READY":
        return
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
