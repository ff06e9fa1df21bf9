"""The parameter groups of optimizers: their parameters and their learning rates.

Loops that change a group, or pair groups with something else, go through `optimizer.param_groups` themselves.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


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
