"""Which device a training runs on, and batches brought there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trimtab.core.errors import InputError

AUTO = "auto"


def choose_device(wanted: str = AUTO) -> torch.device:
    """The device of that name; `auto` is the first GPU where there is one, else the CPU.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
        >>> choose_device("gpu")
        Traceback (most recent call last):
            ...
        trimtab.core.errors.InputError: device is 'gpu'; expected auto, cpu, cuda or cuda:N
    """
    if wanted == AUTO:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(wanted)
    except (RuntimeError, TypeError):
        raise InputError(f"device is {wanted!r}; expected auto, cpu, cuda or cuda:N") from None
    if device.type == "meta":
        raise InputError("device is 'meta', on which nothing is computed; expected auto, cpu, cuda or cuda:N")
    if device.type != "cuda":
        return device
    num = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num == 0:
        raise InputError(f"device is {wanted!r}, and PyTorch sees no GPU here; use --device cpu or auto")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= num:
        raise InputError(f"device is {wanted!r}, and there are {num} GPUs; expected cuda:0 to cuda:{num - 1}")
    return torch.device("cuda", index)


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
