"""The losses of each epoch, and the four issues that they show."""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise
from statistics import median
from typing import TypedDict

from torch import Tensor

from trimtab.core.errors import InputError
from trimtab.sample.transfer import number

TRAIN_LOSS_NAN_INF = "train_loss_nan_inf"
VAL_LOSS_NAN_INF = "val_loss_nan_inf"
LOSS_EXPLOSION = "loss_explosion"
OVERFITTING = "overfitting"
ISSUES = (TRAIN_LOSS_NAN_INF, VAL_LOSS_NAN_INF, LOSS_EXPLOSION, OVERFITTING)

EXPLOSION_FACTOR = 10.0
SMALLEST_SCALE = 1e-6
SCALE_SHARE = 0.01
"""A loss near 0 is measured by this share of the median of all: ten times nearly nothing is still nearly nothing."""
WINDOW = 1000


class HistoryState(TypedDict):
    """What a checkpoint holds of a history."""

    epochs: list[list[float | None]]


class LossHistory:
    """The finite losses of the last epochs, without NaN and Inf.

    Example:
        >>> history = LossHistory()
        >>> history.push(1.0, 1.5)
        >>> history.push(float("nan"), 1.4)
        >>> history.train, history.val
        ([1.0], [1.5, 1.4])
    """

    def __init__(self, window: int = WINDOW) -> None:
        if window < 2:
            raise InputError(f"window is {window}; expected at least 2 epochs, to compare one with the one before")
        self._epochs: deque[tuple[float | None, float | None]] = deque(maxlen=window)

    @property
    def train(self) -> list[float]:
        """The finite training losses, oldest first."""
        return [train for train, _ in self._epochs if train is not None]

    @property
    def val(self) -> list[float]:
        """The finite validation losses, oldest first."""
        return [val for _, val in self._epochs if val is not None]

    @property
    def epochs(self) -> list[tuple[float | None, float | None]]:
        """Training and validation loss of each epoch; None if it was not finite or not given."""
        return list(self._epochs)

    @property
    def scale(self) -> float:
        """The smallest magnitude that a loss is compared with."""
        usual = median([abs(loss) for loss in self.train] or [0.0])  # not the largest: one spike would hide the next
        return max(SCALE_SHARE * usual, SMALLEST_SCALE)

    def push(self, train_loss: float, val_loss: float | None = None) -> None:
        """Add an epoch."""
        epoch = _finite(train_loss), _finite(val_loss)
        if epoch != (None, None):
            self._epochs.append(epoch)

    def state_dict(self) -> HistoryState:
        """Plain data."""
        return {"epochs": [list(e) for e in self._epochs]}

    def load_state_dict(self, state: HistoryState) -> None:
        """Continue from where `state_dict` was taken."""
        self._epochs.clear()
        self._epochs.extend((train, val) for train, val in state["epochs"])


def check_training_stability(
    train_loss: Tensor | float,
    val_loss: Tensor | float | None = None,
    history: LossHistory | None = None,
    *,
    explosion_factor: float = EXPLOSION_FACTOR,
    persistence: int = 1,
    min_rise: float = 0.0,
) -> list[str]:
    """What is wrong with an epoch's losses, by the documented names; then the epoch joins `history`.

    `train_loss_nan_inf` and `val_loss_nan_inf` need no history. `loss_explosion` is a rise by nine times the size of
    the last finite training loss: for positive losses ten times it, and right for negative ones and those near 0 too.
    `overfitting` is the validation loss rising (by more than `min_rise` of its size) while the training loss falls,
    in each of the last `persistence` epochs: 1 is the documented criterion, which a single noisy epoch can meet.

    Example:
        >>> history = LossHistory()
        >>> check_training_stability(1.0, 1.2, history), check_training_stability(0.9, 1.3, history)
        ([], ['overfitting'])
        >>> check_training_stability(9.5, float("nan"), history)
        ['val_loss_nan_inf', 'loss_explosion']
    """
    if explosion_factor <= 1 or persistence < 1:
        raise InputError(
            f"explosion_factor is {explosion_factor} and persistence {persistence}; expected above 1, and at least 1"
        )
    train, val = number(train_loss), None if val_loss is None else number(val_loss)
    issues = []
    if not math.isfinite(train):
        issues.append(TRAIN_LOSS_NAN_INF)
    if val is not None and not math.isfinite(val):
        issues.append(VAL_LOSS_NAN_INF)
    if history is None:
        return issues
    if _exploded(train, history, explosion_factor):
        issues.append(LOSS_EXPLOSION)
    if _overfits([*history.epochs, (_finite(train), _finite(val))], persistence, min_rise):
        issues.append(OVERFITTING)
    history.push(train, val)
    return issues


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _exploded(train: float, history: LossHistory, factor: float) -> bool:
    known = history.train
    if not known or not math.isfinite(train):
        return False
    return train - known[-1] > (factor - 1.0) * max(abs(known[-1]), history.scale)


def _overfits(epochs: list[tuple[float | None, float | None]], persistence: int, min_rise: float) -> bool:
    recent = epochs[-persistence - 1 :]
    if len(recent) <= persistence:
        return False
    for (train, val), (next_train, next_val) in pairwise(recent):
        if train is None or val is None or next_train is None or next_val is None:
            return False
        if not (next_val - val > min_rise * abs(val) and next_train < train):
            return False
    return True
