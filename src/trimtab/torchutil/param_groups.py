"""The parameter groups of an optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def rates_of(optimizer: Any) -> list[float]:
    """The rate of every group; NaN where only the device knows it."""
    rates = [group.get("lr", 0.0) for group in optimizer.param_groups]
    return [float(r) if not isinstance(r, Tensor) or r.is_cpu else float("nan") for r in rates]
