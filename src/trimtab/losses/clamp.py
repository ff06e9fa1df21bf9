"""A clamp that bends instead of cutting: bounded, and with a gradient everywhere."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["soft_clamp"]


def soft_clamp(x: Tensor, low: float, high: float) -> Tensor:
    """`x` itself in the middle half between the bounds, bent towards them outside, never beyond.

    Outside it follows ``t -> 1 - 1 / (1 + log(1 + t))``: the slope is 1 where it begins and falls like ``1/t``, so that
    even a value of 1e30 has a gradient that leads it back. With one infinite bound only the other side is bent, from
    half the bound's magnitude before it; with two nothing is.

    Example:
        >>> soft_clamp(torch.tensor([-1e9, -3.0, 0.0, 5.0, 8.0, 1e30]), -10, 10)
        tensor([-9.7514, -3.0000,  0.0000,  5.0000,  6.5986,  9.9270])
    """
    if not low < high:
        raise ValueError(f"the bounds are {low} and {high}; the first must be less than the second")
    if math.isfinite(low) and math.isfinite(high):
        room = (high - low) / 4
        low_room, high_room = room, room
    else:
        low_room, high_room = max(abs(low), 1.0) / 2, max(abs(high), 1.0) / 2
    if math.isfinite(high):
        x = _bend(x, high - high_room, high_room)
    if math.isfinite(low):
        x = -_bend(-x, -low - low_room, low_room)
    return x


def _bend(x: Tensor, start: float, room: float) -> Tensor:
    inside = ~(x > start)  # NaN too: it must stay what it is
    over = ((x - start) / room).masked_fill(inside, 0.0)
    bent = start + room * (1.0 - 1.0 / (1.0 + over.log1p()))
    return torch.where(inside, x, bent)
