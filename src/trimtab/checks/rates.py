"""Learning rates: the highest that a schedule will reach, and other ones in their place."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor


def rates_of(optimizers: Sequence[Any]) -> list[list[float]]:
    """The rates of every optimizer and group, as they are."""
    return [[float(g.get("lr", 0.0)) for g in o.param_groups] for o in optimizers]


def peaks(optimizers: Sequence[Any], schedulers: Sequence[Any], num: int) -> list[list[float]]:
    """The highest rates within so many moves of the schedules, which are not moved back here."""
    top = rates_of(optimizers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for scheduler in schedulers:
            if hasattr(scheduler, "num_bad_epochs"):
                continue  # it wants to be told how things go
            try:
                for _ in range(num):
                    scheduler.step()
                    now = rates_of(optimizers)
                    top = [[max(a, b) for a, b in zip(x, y, strict=True)] for x, y in zip(top, now, strict=True)]
            except Exception:
                continue  # it ends before that, or wants arguments
    return top


def set_rates(optimizers: Sequence[Any], rates: list[list[float]], factor: float = 1.0) -> None:
    """Put other rates in their place."""
    for optimizer, mine in zip(optimizers, rates, strict=True):
        for group, rate in zip(optimizer.param_groups, mine, strict=True):
            if isinstance(group.get("lr"), Tensor):
                group["lr"].fill_(rate * factor)
            elif "lr" in group:
                group["lr"] = rate * factor
