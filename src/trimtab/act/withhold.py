"""Make one optimizer step an exact no-op from inside: no gradient to apply, and whatever moved is put back."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class Withheld:
    """Hides the gradients for one step.

    torch.optim's own classes skip a parameter without a gradient, state and all. What other classes do is unknown
    (some count steps in their groups, some read `p.grad` without asking): they get zero gradients, and everything
    they own is copied and put back. That costs a copy of the weights, but only in a step that is thrown away anyway.
    """

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._params = list(params)
        self._grads = [p.grad for p in self._params]
        kind = type(optimizer)
        # LBFGS counts its evaluations even when it finds nothing to do.
        known = kind.__module__.startswith("torch.optim") and "LBFGS" not in kind.__name__
        self._owned = None if known else Owned(optimizer, self._params)
        self._groups = [_scalars(g) for g in optimizer.param_groups]
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = None if known or grad is None else torch.zeros_like(grad)

    def put_back(self) -> None:
        """Give the gradients back and undo whatever the step changed in spite of having none."""
        for p, grad in zip(self._params, self._grads, strict=True):
            p.grad = grad
        if self._owned is not None:
            self._owned.restore()
        for group, scalars in zip(self._optimizer.param_groups, self._groups, strict=False):
            for key, value in scalars.items():
                if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                    group[key].copy_(value)  # in place: a scheduler or the user may hold this very tensor
                else:
                    group[key] = value


class Owned:
    """A copy of everything an optimizer of an unknown class may have changed."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor]) -> None:
        self._optimizer = optimizer
        self._params = params
        self._weights = [p.detach().clone() for p in params]
        self._state = {key: copy.deepcopy(value) for key, value in _state(optimizer).items()}
        self._public = {k: v for k, v in vars(optimizer).items() if not k.startswith("_") and _is_scalar(v)}

    def restore(self) -> None:
        """Put it all back."""
        with torch.no_grad():
            for p, weight in zip(self._params, self._weights, strict=True):
                p.copy_(weight)
        state = _state(self._optimizer)
        state.clear()
        state.update(self._state)
        vars(self._optimizer).update(self._public)


def _state(optimizer: Any) -> Any:
    """The per-parameter state; a class that only looks like an optimizer may have none."""
    return getattr(optimizer, "state", {})


def _scalars(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in group.items() if k != "params" and _is_scalar(v)}


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | tuple | Tensor)
