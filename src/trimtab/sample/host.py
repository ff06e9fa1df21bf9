"""The one place where values leave a device and the host may have to wait for them."""

from __future__ import annotations

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
