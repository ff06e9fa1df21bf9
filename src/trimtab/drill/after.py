"""What is left of a run when it is over: where it raised, what is not finite, a fingerprint of its weights."""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.checks.leaves import mark
from trimtab.checks.target import Target


def place(error: BaseException) -> str:
    """Where an error was raised, in a few words."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def number_of(loss: Any) -> float:
    """A loss as a number; NaN where it is none."""
    try:
        return float(loss)
    except (TypeError, ValueError, RuntimeError):
        return math.nan


def sick(target: Target) -> Iterator[str]:
    """What holds a number that is not finite.

    Example:
        >>> model = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(model.bias, math.nan)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> list(sick(Target(model=model, optimizer=optimizer, loader=[])))
        ['weights']
    """
    states = [entry for one in target.optimizers for entry in getattr(one, "state", {}).values()]
    parts: dict[str, list[Any]] = {
        "weights": list(target.model.parameters()),
        "buffers": list(target.model.buffers()),
        "optimizer state": [v for entry in states if isinstance(entry, dict) for v in entry.values()],
        "average": list(target.ema.parameters()) if hasattr(target.ema, "parameters") else [],
    }
    for name, values in parts.items():
        real = [v.detach() for v in values if isinstance(v, Tensor) and v.is_floating_point() and not v.is_meta]
        if not all(bool(torch.isfinite(v).all()) for v in real):
            yield name


def fingerprint(model: nn.Module) -> str:
    """A few letters that are others as soon as one weight is."""
    return hashlib.sha256(" ".join(str(mark(p)) for p in model.parameters()).encode()).hexdigest()[:16]
