"""An average of the weights that follows only updates that were really made, buffers included."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


def make_average(model: nn.Module, decay: float | None) -> Any:
    """An exponential moving average of weights and buffers, torch's own; None where no decay is given.

    Example:
        >>> import torch
        >>> model = nn.Linear(1, 1, bias=False)
        >>> average = make_average(model, 0.5)
        >>> for value in (1.0, 3.0):
        ...     _ = nn.init.constant_(model.weight, value)
        ...     average.update_parameters(model)
        >>> average.module.weight.item()
        2.0
    """
    if decay is None:
        return None
    follow = get_ema_multi_avg_fn(decay)  # type: ignore[no-untyped-call]
    return AveragedModel(model, multi_avg_fn=follow, use_buffers=True)


def averaged_or(model: nn.Module, average: Any) -> nn.Module:
    """The model whose metrics count: the average once it has begun, else the model itself."""
    if average is None or int(average.n_averaged) == 0:
        return model
    inner: nn.Module = average.module
    return inner
