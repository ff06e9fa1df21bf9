"""Small things about optimizers that nobody told us of: what they move, and whether a backward pass fed them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

NUM_MARKED = 16


def marks_of(optimizers: Iterable[Any]) -> dict[int, object]:
    """By optimizer, what of its gradients changes when a backward pass adds to them."""
    out: dict[int, object] = {}
    for optimizer in optimizers:
        params = params_of(optimizer)
        some = params[:: len(params) // NUM_MARKED + 1]
        out[id(optimizer)] = [None if p.grad is None else (id(p.grad), p.grad._version) for p in some]
    return out


def params_of(optimizer: Any) -> list[Tensor]:
    """All tensors that an optimizer moves."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def wrap_method(home: type, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Put `around(inner, *args)` in the place of a method; returns how to take it off again."""
    inner = getattr(home, name)

    @functools.wraps(inner)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(inner, *args, **kwargs)

    setattr(home, name, wrapper)
    return lambda: setattr(home, name, inner)


def still_scaled(lane: Any) -> bool:
    """Whether a GradScaler has yet to unscale these gradients: their norm is not a true one."""
    scaler = lane.scaler
    if scaler is None or not scaler.is_enabled():
        return False
    states = getattr(scaler, "_per_optimizer_states", {})
    return id(lane.optimizer) not in states or states[id(lane.optimizer)]["stage"].name == "READY"
