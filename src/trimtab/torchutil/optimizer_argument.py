"""Optimizers as they are passed: one or several, wrapped or not; unwrapped, labelled and checked."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from trimtab.core.errors import AttachError, InputError
from trimtab.torchutil.param_groups import params_of

GUARDED: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that an open guard has."""


def innermost(optimizer: object) -> Any:
    """The optimizer whose hooks are really called: wrappers such as Accelerate's never run their own."""
    while not hasattr(optimizer, "_optimizer_step_pre_hooks") and hasattr(optimizer, "optimizer"):
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
