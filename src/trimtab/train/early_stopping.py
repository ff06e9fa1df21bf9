"""Ends a training that no longer improves, and knows when it was best."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from trimtab.core.errors import InputError
from trimtab.core.suggest_name import did_you_mean

log = logging.getLogger("trimtab")


class EarlyStopping:
    """Counts epochs without improvement of one metric.

    `monitor` is its name, with a minus where less is better. A value that is not finite is no improvement. With
    `patience` 0 nothing is ever stopped, but the best is still known.

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
        self.told = False  # that there is no such metric
        self._best = -math.inf
        self.epochs_without_improvement = 0

    @property
    def best(self) -> float | None:
        """The best value so far; None before there is any."""
        return self._sign * self._best if math.isfinite(self._best) else None

    @property
    def stop(self) -> bool:
        """Whether patience is at an end."""
        return self.patience > 0 and self.epochs_without_improvement >= self.patience

    def update(self, metrics: Mapping[str, float]) -> bool:
        """Take in an epoch; whether it is the best so far. One without the metric does not count."""
        if self.metric not in metrics:
            return False
        value = self._sign * metrics[self.metric]
        better = math.isfinite(value) and value > self._best + (self.min_delta if math.isfinite(self._best) else 0.0)
        if better:
            self._best, self.epochs_without_improvement = value, 0
        else:
            self.epochs_without_improvement += 1
        return better

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"best": self._best, "epochs_without_improvement": self.epochs_without_improvement}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._best = float(state["best"])
        self.epochs_without_improvement = int(state["epochs_without_improvement"])


def warn_of_no_metric(stopping: EarlyStopping, metrics: Mapping[str, float]) -> None:
    """Say once that the metric to go by is not there: nothing would be the best, and nothing would ever stop."""
    if stopping.metric in metrics or stopping.told:
        return
    stopping.told = True
    if stopping.metric == "val_loss":
        tell, hint = (
            log.warning if stopping.patience else log.info,
            "give a validation loader, or monitor='-train_loss'",
        )
    else:
        tell = log.warning
        hint = did_you_mean(stopping.metric, metrics, otherwise=f"an epoch has {', '.join(metrics)}")
    tell("no epoch has %r to be judged by: none is the best, and none the last; %s", stopping.metric, hint)
