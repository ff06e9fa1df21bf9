"""Which device a training runs on."""

from __future__ import annotations

import torch

from trimtab.core.errors import InputError
from trimtab.sample.transfer import to_device

__all__ = ["AUTO", "choose_device", "to_device"]

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
