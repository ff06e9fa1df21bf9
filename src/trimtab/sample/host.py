"""The one place where values cross between host and device, and where the host may have to wait for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_host(tensor: Tensor) -> NDArray[Any]:
    """The values as numpy: a view for CPU tensors, a copy that waits for the device otherwise."""
    tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.to("cpu")
    if tensor.dtype is torch.bfloat16:  # numpy has no such type
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy()
    return array


def number(value: Tensor | float) -> float:
    """A scalar as a Python float; waits for the device if it lives on one."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device, sent through pinned memory so that the host does not wait for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with every tensor on the device, without waiting for it; what is there already is not copied.

    Example:
        >>> to_device({"x": torch.ones(1), "name": "a"}, torch.device("cpu"))
        {'x': tensor([1.]), 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(one, device) for key, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(one, device) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(one, device) for one in batch)
    return batch
