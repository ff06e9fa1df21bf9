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
MANY_ZEROS, MIN_LOGITS = 0.1, 32
ALIKE, MIN_ALIKE = 1e-3, 8
"""Share of the spread of answers below which their targets are one; answers that it takes."""
FAR = 3.0
"""Logits beyond which a yes or a no is sure."""


@dataclass(frozen=True, slots=True)
class Answers:
    """How well a batch of answers did: the mean loss of one, that of guessing blindly, and what was right.

    `labels` are the classes of a cross-entropy; `values` the targets of the others, in the shape of the answers.
    `are_shares`: answers that were taken for logits are probabilities already. `zeros`: the share of logits that are
    exactly 0, where none is negative and many are 0. `one_target`: all answers were compared with this one value,
    though the loss says that the targets differ. `side`: all of them should be yes (1) or no (0).
    """

    loss: float
    blind: float
    labels: NDArray[np.int64] | None = None
    values: F64 | None = None
    are_shares: bool = False
    zeros: float = 0.0
    one_target: float | None = None
    side: float | None = None


def by_classes(logits: F64, grad: F64, *, upwards: bool) -> Answers | None:
    """Of rows of logits and of the gradient of a mean cross-entropy there; None where that is not what it is."""
    used = np.logical_or.reduce(grad, 1)
    if not np.logical_and.reduce(used):
        logits, grad = logits[used], grad[used]
    num = len(logits)
    if num < 2 or logits.shape[1] < 2 or not math.isfinite(np.add.reduce(logits, None)):
        return None
    labels = (-grad if upwards else grad).argmin(1)
    shifted = logits - np.maximum.reduce(logits, 1, keepdims=True)
    logs = shifted[np.arange(num), labels] - np.log(np.add.reduce(np.exp(shifted), 1))
    shares, zeros = False, 0.0
    if logits.min() >= 0:  # else they are neither probabilities nor what a ReLU has made
        shares = num >= MIN_PROBABILITIES and float(np.abs(np.add.reduce(logits, 1) - 1.0).max()) < 1e-3
        zeros = share_of_zeros(logits)
    loss = -float(np.add.reduce(logs)) / num
    return Answers(loss, math.log(logits.shape[1]), labels=labels, are_shares=shares, zeros=zeros)


def share_of_zeros(logits: F64) -> float:
    """The share of logits that are exactly 0, if a ReLU has made them: none is negative, many are 0, not all are."""
    if logits.size < MIN_LOGITS or logits.min() < 0 or logits.max() <= 0:
        return 0.0
    share = float((logits == 0).mean())
    return share if share >= MANY_ZEROS else 0.0


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
    # Where every answer should be the same, as for one half of an adversarial loss, no guess is blind.
    side = float(targets.min()) if targets.min() == targets.max() else None
    blind = math.log(2.0) if side is None else math.nan
    return Answers(loss, blind, values=targets, are_shares=bool(shares), zeros=share_of_zeros(logits), side=side)


def by_sure_ones(logits: F64, grad: F64) -> Answers | None:
    """Of logits of a binary cross-entropy that are all far on one side: the gradient's sign says whether rightly."""
    yes = float(np.sign(logits.flat[0])) if logits.size else 0.0
    if logits.size < MIN_ALIKE or not (yes * logits > FAR).all() or not (yes * grad <= 0.0).all():
        return None
    return Answers(float(np.log1p(np.exp(-yes * logits)).mean()), math.nan, side=max(yes, 0.0))


def by_values(answers: F64, grad: F64, loss: float) -> Answers | None:
    """Of answers and of the gradient of their mean squared error, which must be the loss that was told.

    Where answers of shape [n, 1] meet targets of shape [n], each answer is compared with each target. Then all of them
    are drawn to the mean of the targets, and the loss is larger than the distances say, by the targets' variance.
    """
    rest = 0.5 * grad * grad.size
    mean: Any = float((rest * rest).mean())
    if not math.isfinite(mean):
        return None
    targets = answers - rest
    if abs(mean - loss) <= CLOSE * abs(loss):
        return Answers(mean, math.nan, values=targets)
    if grad.size >= MIN_ALIKE and loss > mean and np.ptp(targets) <= ALIKE * np.ptp(answers):
        return Answers(mean, math.nan, one_target=float(targets.mean()))
    return None
