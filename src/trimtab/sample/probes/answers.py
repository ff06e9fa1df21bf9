"""What the answers of a model were compared with, read off the gradient that comes back into them.

The gradient of a mean cross-entropy is the difference of probabilities and targets, that of a mean squared error the
difference of values and targets. So targets need not be told, and what else is added to a loss does not matter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
CLOSE = 0.02
MIN_PROBABILITIES = 4


@dataclass(frozen=True, slots=True)
class Answers:
    """How well a batch of answers did: the mean loss of one, that of guessing blindly, and what was right.

    `labels` are the classes of a cross-entropy; `values` the targets of the others, in the shape of the answers.
    `are_shares`: answers that were taken for logits are probabilities already.
    """

    loss: float
    blind: float
    labels: NDArray[np.int64] | None = None
    values: F64 | None = None
    are_shares: bool = False


def by_classes(logits: F64, grad: F64, *, upwards: bool) -> Answers | None:
    """Of rows of logits and of the gradient of a mean cross-entropy there; None where that is not what it is."""
    used = grad.any(1)
    logits, grad = logits[used], -grad[used] if upwards else grad[used]
    if len(logits) < 2 or logits.shape[1] < 2 or not np.isfinite(logits).all():
        return None
    labels = grad.argmin(1)
    shifted = logits - logits.max(1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    near = np.abs(logits.sum(1) - 1.0).max() < 1e-3
    shares = len(logits) >= MIN_PROBABILITIES and logits.min() >= 0 and near
    loss = -float(logs[np.arange(len(labels)), labels].mean())
    return Answers(loss, math.log(logits.shape[1]), labels=labels, are_shares=bool(shares))


def by_yes_and_no(logits: F64, grad: F64, *, factor: float) -> Answers | None:
    """Of logits and of the gradient of a mean binary cross-entropy, `factor` times that."""
    share = 1.0 / (1.0 + np.exp(-logits))
    targets = share - grad * grad.size / factor
    sound = np.abs(targets - np.round(targets)) < CLOSE
    if not sound.all() or targets.min() < -CLOSE or targets.max() > 1.0 + CLOSE:
        return None
    targets = np.round(targets)
    loss = float((np.logaddexp(0.0, logits) - targets * logits).mean())
    shares = logits.size >= 64 and logits.min() >= 0.0 and logits.max() <= 1.0 and float(np.ptp(logits)) > 0.6
    return Answers(loss, math.log(2.0), values=targets, are_shares=bool(shares))


def by_values(answers: F64, grad: F64, loss: float) -> Answers | None:
    """Of answers and of the gradient of their mean squared error, which must be the loss that was told."""
    rest = 0.5 * grad * grad.size
    mean: Any = float((rest * rest).mean())
    if not (math.isfinite(mean) and abs(mean - loss) <= CLOSE * abs(loss)):
        return None
    return Answers(mean, math.nan, values=answers - rest)
