"""Optimizers as users give them: one or several, wrapped or not, with their parameter groups and their GradScaler."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from trimtab.core.errors import AttachError, InputError


def groups_of(*optimizers: Any) -> list[dict[str, Any]]:
    """The groups of these optimizers, in order: the very dicts that they step with."""
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def params_of(*optimizers: Any) -> list[Tensor]:
    """All tensors that these optimizers hold, group by group; one that is held twice comes twice.

    Example:
        >>> import torch
        >>> a, b = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
        >>> params_of(torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1))
        [tensor([0.], requires_grad=True), tensor([1.], requires_grad=True)]
    """
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def rates_of(optimizer: Any, *, missing: float = 0.0, wait: bool = False) -> list[float]:
    """The learning rate of every group; `missing` where a group has none.

    A rate that is a tensor on a device is NaN, unless you `wait` for the device.

    Example:
        >>> import torch
        >>> a, b = torch.zeros(1), torch.ones(1)
        >>> rates_of(torch.optim.SGD([{"params": [a]}, {"params": [b], "lr": 0.5}], lr=0.1))
        [0.1, 0.5]
    """
    rates = [group.get("lr", missing) for group in optimizer.param_groups]
    return [float(r) if wait or not isinstance(r, Tensor) or r.is_cpu else float("nan") for r in rates]


GUARDED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that an open guard has."""


def innermost(optimizer: object) -> Any:
    """The optimizer whose hooks are really called: wrappers such as Accelerate's never run their own.

    Fabric's passes every question on to the one inside, so that it seems to have hooks.
    """
    while "_optimizer_step_pre_hooks" not in getattr(optimizer, "__dict__", {}) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    if not hasattr(optimizer, "param_groups") or not callable(getattr(optimizer, "step", None)):
        raise InputError(
            f"optimizer is a {type(optimizer).__name__} without param_groups or step(); "
            "expected a torch.optim.Optimizer, or a list or dict of them"
        )
    return optimizer


def labelled(optimizer: object) -> dict[str, Any]:
    """The optimizers to guard by label: one is labelled "", several by their key or place."""
    if isinstance(optimizer, LRScheduler):
        raise InputError(f"optimizer is the scheduler {type(optimizer).__name__}; pass scheduler.optimizer instead")
    if isinstance(optimizer, Mapping):
        found = {str(k): v for k, v in optimizer.items()}
    elif isinstance(optimizer, Sequence) and not isinstance(optimizer, str):
        found = {str(i): v for i, v in enumerate(optimizer)}
    else:
        found = {"": optimizer}
    if not found:
        raise InputError("optimizer is empty; expected an optimizer, or a list or dict of them")
    if len(found) == 1:
        found = {"": next(iter(found.values()))}
    inner = {label: innermost(o) for label, o in found.items()}
    if len({id(o) for o in inner.values()}) != len(inner):
        raise InputError("the same optimizer is given twice; expected each once")
    return inner


def is_guarded(optimizer: object) -> bool:
    """Whether an open guard has it already."""
    return optimizer in GUARDED


def check_optimizer(optimizer: object, model: nn.Module, label: str) -> None:
    """Refuse an optimizer that does not move this model, or that is guarded already."""
    where = f"optimizer {label!r}" if label else "the optimizer"
    if is_guarded(optimizer):
        raise AttachError(f"{where} is already guarded; close() the other guard first, or use that one")
    mine = {id(p) for p in model.parameters()}
    params = params_of(optimizer)
    if not any(id(p) in mine for p in params):
        raise InputError(
            f"none of the {len(params)} parameters of {where} ({type(optimizer).__name__}) belong to the model "
            f"({type(model).__name__}); expected an optimizer built from model.parameters(). "
            "Build it after the model is complete and on its device."
        )


def needs_closure(optimizer: object) -> bool:
    """Whether its step cannot be called without a closure, as that of LBFGS."""
    kind: Any = type(optimizer)
    return _kind_needs_closure(kind)


@cache
def _kind_needs_closure(kind: Any) -> bool:
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def scale_of(scaler: Any) -> float | Tensor | None:
    """The current loss scale; None where there is no scaler or it is switched off."""
    if scaler is None or not scaler.is_enabled():
        return None
    scale: Tensor | None = getattr(scaler, "_scale", None)
    if isinstance(scale, Tensor):
        return scale.clone()  # update() changes it in place while the sample is still under way
    return float(scaler.get_scale())  # before the first scale() it is a plain number


def still_scaled(scaler: Any, optimizer: Any) -> bool:
    """Whether a GradScaler has not unscaled these gradients yet, so that their norm is too large."""
    if scaler is None or not scaler.is_enabled():
        return False
    states = getattr(scaler, "_per_optimizer_states", {})
    return id(optimizer) not in states or states[id(optimizer)]["stage"].name == "READY"


def unscale(scaler: Any, optimizer: Any) -> None:
    """Unscale once: a loop that already did so for its own clipping is left alone."""
    if still_scaled(scaler, optimizer):
        scaler.unscale_(optimizer)
