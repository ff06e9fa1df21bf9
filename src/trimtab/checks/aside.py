"""Small helps: what is no number, a schedule that stands still, where an average keeps its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.checks.keep import Memory


def is_bad(tensor: Tensor) -> bool:
    """Whether it holds NaN or Inf and is no mask of 0 and -inf."""
    if tensor.is_meta or not tensor.is_floating_point() or bool(torch.isfinite(tensor).all()):
        return False
    return (
        bool(torch.isnan(tensor).any())
        or bool(tensor[torch.isfinite(tensor)].any())
        or bool((tensor == torch.inf).any())
    )


@contextmanager
def standing_still(scheduler: Any) -> Iterator[None]:
    """A schedule whose steps do nothing."""
    had = vars(scheduler).get("step")
    scheduler.step = lambda *args, **kwargs: None
    try:
        yield
    finally:
        if had is None:
            vars(scheduler).pop("step", None)
        else:
            scheduler.step = had


def tensors_of(average: Any) -> list[Tensor]:
    """The averaged weights, wherever an average keeps them."""
    if average is None:
        return []
    if isinstance(average, nn.Module):
        return [p for p in average.parameters() if not p.is_meta]
    memory = Memory(average)
    found: list[Tensor] = [t for m in memory.modules for t in m.parameters(recurse=False)]
    shadows = (
        [v for v in vars(average).values() if isinstance(v, dict | list | tuple)]
        if hasattr(average, "__dict__")
        else []
    )
    for held in shadows:
        found += [t for t in (held.values() if isinstance(held, dict) else held) if isinstance(t, Tensor)]
    return [t for t in found if t.is_floating_point()]


def mark_of(average: Any) -> float | None:
    """One number that changes when an average does; None where there is none."""
    tensors = tensors_of(average)
    if not tensors:
        return None
    return sum(float(t.detach().double().abs().sum()) + float(t.detach().double().sum()) for t in tensors)
