"""Early warning: which measured quantities jump before the loss does, how long before, and how often for nothing."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from trimtab.core.types import Column, Kind, Sample

JUMP = 3.0
MEMORY = 32
MIN_HISTORY = 16
SIGNALS = ("update ratio", "second-moment lag", "gradient of one layer", "gradient norm")


def values(signal: str, samples: Iterable[Sample]) -> Iterator[tuple[int, float]]:
    """One number a step: high means strained."""
    names = {"update ratio": "update_ratio", "second-moment lag": "moment_lag", "gradient norm": "grad_norm"}
    usual: dict[str, np.ndarray] = {}
    for sample in samples:
        if signal in names:
            value = sample.scalars.get(names[signal])
        else:
            value = _growth(sample, usual)
        if value is not None:
            yield sample.step, value


def _growth(sample: Sample, usual: dict[str, np.ndarray]) -> float | None:
    """The gradient norm of the layer that has grown most, over its own running mean of logs."""
    norms = sample.col(Kind.GRAD, Column.L2).astype(np.float64)
    if not norms.size:
        return None
    with np.errstate(all="ignore"):
        logs = np.where(norms > 0, np.log(norms), np.nan)
    before = usual.get("logs")
    if before is None or before.shape != logs.shape:
        usual["logs"] = logs
        return None
    with np.errstate(invalid="ignore"):
        grown = logs - before
    usual["logs"] = np.where(np.isnan(logs), before, np.where(np.isnan(before), logs, 0.9 * before + 0.1 * logs))
    top = np.nanmax(grown) if not np.isnan(grown).all() else np.nan
    return float(np.exp(min(top, 50.0))) if np.isfinite(top) else None


def first_jump(signal: str, samples: Iterable[Sample], since: int = 0) -> int | None:
    """The first step from `since` on at which a signal is not finite or jumps above all it was lately."""
    last: deque[float] = deque(maxlen=MEMORY)
    for step, value in values(signal, samples):
        if not math.isfinite(value) or (len(last) >= MIN_HISTORY and value > JUMP * max(last)):
            if step >= since:
                return step
        else:
            last.append(value)
    return None
