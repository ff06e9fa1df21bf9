"""Stops a training that no longer improves, and keeps the best value."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TypedDict

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import did_you_mean

log = logging.getLogger("trimtab")


class StoppingState(TypedDict):
    """What a checkpoint holds of it."""

    best: float
    epochs_without_improvement: int


class EarlyStopping:
    """Counts epochs without improvement of one metric.

    Args:
        monitor: The name of the metric, with a minus if less is better.
        patience: Epochs without improvement before it stops; 0: it never stops, but the best is still known.
        min_delta: The smallest difference that counts as an improvement. A non-finite value is no improvement.

    Example:
        >>> stopping = EarlyStopping("-val_loss", patience=2)
        >>> [stopping.update({"val_loss": loss}) for loss in (1.0, 0.5, 0.5)]
        [True, True, False]
        >>> stopping.update({"val_loss": 0.6}), stopping.stop, stopping.best
        (False, True, 0.5)
    """

    def __init__(self, monitor: str = "-val_loss", *, patience: int = 10, min_delta: float = 1e-4) -> None:
        if patience < 0 or min_delta < 0:
            raise InputError(f"patience is {patience} and min_delta {min_delta}; expected 0 or more of both")
        self.metric, self._sign = monitor.removeprefix("-"), -1.0 if monitor.startswith("-") else 1.0
        self.patience, self.min_delta = patience, min_delta
        self.warned = False  # that there is no such metric
        self._best = -math.inf
        self.epochs_without_improvement = 0

    @property
    def best(self) -> float | None:
        """The best value so far; None before there is any."""
        return self._sign * self._best if math.isfinite(self._best) else None

    @property
    def stop(self) -> bool:
        """Whether there was no improvement for `patience` epochs."""
        return self.patience > 0 and self.epochs_without_improvement >= self.patience

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Add an epoch; returns whether it is the best so far. An epoch without the metric does not count."""
        if self.metric not in metrics:
            return False
        value = self._sign * metrics[self.metric]
        better = math.isfinite(value) and value > self._best + (self.min_delta if math.isfinite(self._best) else 0.0)
        if better:
            self._best, self.epochs_without_improvement = value, 0
        else:
            self.epochs_without_improvement += 1
        return better

    def state_dict(self) -> StoppingState:
        """Plain data."""
        return {"best": self._best, "epochs_without_improvement": self.epochs_without_improvement}

    def load_state_dict(self, state: StoppingState) -> None:
        """Continue from where `state_dict` was taken."""
        self._best = float(state["best"])
        self.epochs_without_improvement = int(state["epochs_without_improvement"])


def warn_of_no_metric(stopping: EarlyStopping, metrics: Mapping[str, float]) -> None:
    """Warn once that the metric is missing: no epoch would be the best, and training would never stop early."""
    if stopping.metric in metrics or stopping.warned:
        return
    stopping.warned = True
    if stopping.metric == "val_loss":
        write, hint = (
            log.warning if stopping.patience else log.info,
            "give a validation loader, or monitor='-train_loss'",
        )
    else:
        write = log.warning
        hint = did_you_mean(stopping.metric, metrics, otherwise=f"an epoch has {', '.join(metrics)}")
    write("no epoch has the metric %r: none is the best, and training is not stopped early; %s", stopping.metric, hint)
