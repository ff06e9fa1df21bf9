"""What a layer put out over some forwards: a few sums that stay on its device until somebody asks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class Activity:
    """What one window of forwards looked like: sums on the device, counts on the host."""

    sums: Tensor  # sum, sum of squares, zeros
    low: Tensor
    high: Tensor
    loudest: Tensor | None = None  # per unit, the largest distance from silence
    at_bounds: Tensor | None = None  # per unit, how many values were
    num_values: int = 0
    num_per_unit: int = 0
    num_forwards: int = 0


def empty(values: Tensor) -> Activity:
    """Nothing seen yet, on the device of these values."""
    wide = torch.float32 if values.device.type == "mps" else torch.float64
    start = torch.zeros(3, dtype=wide, device=values.device)
    return Activity(start, torch.full_like(start[0], torch.inf), torch.full_like(start[0], -torch.inf))


def take_in(
    window: Activity, values: Tensor, unit: int | None, floor: float | None, bounds: tuple[float, float] | None
) -> None:
    """Add one output: per unit how far from `floor` it got, and how often it was outside of `bounds`, where given."""
    wide = window.sums.dtype
    square = torch.linalg.vector_norm(values, dtype=wide).square()
    zeros = values.numel() - torch.count_nonzero(values)
    # Never in place: a tensor made in inference mode must not be changed outside of it.
    window.sums = window.sums + torch.stack([values.sum(dtype=wide), square, zeros.to(wide)])
    low, high = torch.aminmax(values)
    window.low, window.high = torch.minimum(window.low, low.to(wide)), torch.maximum(window.high, high.to(wide))
    window.num_values += values.numel()
    window.num_forwards += 1
    if unit is None:
        return
    rest = [d for d in range(values.dim()) if d != unit]
    window.num_per_unit += values.numel() // values.shape[unit]
    if floor is not None:
        loud = torch.maximum(values.amax(rest) - floor, floor - values.amin(rest)).to(wide)
        window.loudest = loud if window.loudest is None else torch.maximum(window.loudest, loud)
    if bounds is not None:
        at = ((values < bounds[0]) | (values > bounds[1])).sum(rest).to(wide)
        window.at_bounds = at if window.at_bounds is None else window.at_bounds + at
