"""Small things about optimizers that nobody told us of: what they move, and whether a backward pass fed them."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

NUM_MARKED = 16
METHODS = ("step", "apply_gradients", "apply", "update")
"""How an optimizer that is none of PyTorch's is told to change the weights."""


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


def lookalikes() -> list[Any]:
    """Everything alive that looks like an optimizer and is none of PyTorch's: by its name, or by what it has.

    Types are asked first: an attribute of an object may be anything, a lazy import say.
    """
    known: dict[type, bool] = {}
    found = []
    for obj in gc.get_objects():
        kind = type(obj)
        if kind not in known:
            known[kind] = _looks_like_one(kind)
        if known[kind] and ("optim" in _names(kind) or quacks(obj)):
            found.append(obj)
    return found


def quacks(obj: Any) -> bool:
    """Whether it has what a guard needs of an optimizer: groups of parameters, and a step."""
    try:
        params = params_of(obj)
    except Exception:  # whatever it is, it is not that
        return False
    return callable(getattr(obj, "step", None)) and bool(params) and all(isinstance(p, Tensor) for p in params)


def _looks_like_one(kind: type) -> bool:
    if issubclass(kind, type | nn.Module | Optimizer | LRScheduler) or kind.__module__.split(".")[0] in _NOT_THEIRS:
        return False
    can = any(callable(getattr(base, name, None)) for base in kind.__mro__ for name in METHODS if name in vars(base))
    groups = any("param_groups" in vars(base) for base in kind.__mro__) or "step" in dir(kind)
    return can and (groups or "optim" in _names(kind))


_NOT_THEIRS = frozenset({"torch", "trimtab", "builtins", "numpy", "sympy"})


def _names(kind: type) -> str:
    return " ".join(base.__name__.lower() for base in kind.__mro__)
