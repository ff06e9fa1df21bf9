"""TrainingHealthMonitor: losses, gradient norms and class accuracies of a run, and one report about them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

import numpy as np
from torch import Tensor

from trimtab.compat.monitors.loss_history import SMALLEST_SCALE
from trimtab.core.errors import InputError
from trimtab.sample.transfer import number, to_host

GRADIENT_NORM_THRESHOLD = 300.0
MIN_GRADIENT_NORM = 1e-12
MIN_REASONABLE_LOSS = 1e-8
CLASS_ACCURACY_GAP = 0.3
STABLE_LOSS_STD = 0.1
WINDOW = 1000
LOSS_SPIKE = 10.0
"""A loss this many times the size of the median of those before it is an anomaly."""
MIN_LOSSES = 3


ClassAccuracy = Mapping[str, Tensor | float] | Mapping[int, Tensor | float] | Sequence[float] | Tensor


class HealthMetrics(TypedDict):
    """The numbers behind a health report; each is empty before there is any."""

    gradient_norm: dict[str, float]
    loss: dict[str, float | str]
    per_class_accuracy: dict[str, float]


class HealthReport(TypedDict):
    """Whether a run is healthy, what is wrong, what to try, and the numbers behind it."""

    training_healthy: bool
    issues: list[str]
    recommendations: list[str]
    metrics: HealthMetrics


class TrainingHealthMonitor:
    """Collects the numbers of a run, and reports on demand whether it is healthy, and why not.

    After `patience` epochs without a loss lower than the best one by `min_delta` the run stagnates. A NaN or Inf is an
    issue, and enters no average. The last `window` values of each kind are kept. Thresholds are the documented ones.

    Example:
        >>> from trimtab import TrainingHealthMonitor
        >>> monitor = TrainingHealthMonitor(patience=2)
        >>> for loss in (1.0, 0.5, 0.5, 0.5):
        ...     monitor.update_epoch_loss(loss)
        >>> monitor.update_gradient_norm(1.5)
        >>> report = monitor.get_health_report()
        >>> report["training_healthy"], report["issues"]
        (False, ['the loss has not improved for 2 epochs'])
        >>> report["metrics"]["gradient_norm"]
        {'average': 1.5, 'maximum': 1.5, 'minimum': 1.5}
    """

    def __init__(
        self,
        patience: int = 5,
        min_delta: float = 1e-4,
        *,
        gradient_norm_threshold: float = GRADIENT_NORM_THRESHOLD,
        min_gradient_norm: float = MIN_GRADIENT_NORM,
        min_reasonable_loss: float = MIN_REASONABLE_LOSS,
        class_accuracy_gap: float = CLASS_ACCURACY_GAP,
        stable_loss_std: float = STABLE_LOSS_STD,
        window: int = WINDOW,
    ) -> None:
        if patience < 1 or window < MIN_LOSSES or min_delta < 0:
            raise InputError(
                f"patience is {patience}, min_delta {min_delta} and window {window}; "
                f"expected at least 1, 0 and {MIN_LOSSES}"
            )
        self.patience, self.min_delta = patience, min_delta
        self._highest, self._lowest = gradient_norm_threshold, min_gradient_norm
        self._floor, self._gap, self._steady = min_reasonable_loss, class_accuracy_gap, stable_loss_std
        self._losses: deque[float] = deque(maxlen=window)
        self._norms: deque[float] = deque(maxlen=window)
        self._classes: dict[str, float] = {}
        self._bad_losses: deque[bool] = deque(maxlen=window)
        self._bad_norms: deque[bool] = deque(maxlen=window)
        self._best = math.inf
        self.epochs_without_improvement = 0

    def update_epoch_loss(self, loss: Tensor | float) -> None:
        """Add the loss of an epoch; a non-finite one counts as no improvement."""
        value = number(loss)
        self._bad_losses.append(not math.isfinite(value))
        if math.isfinite(value):
            self._losses.append(value)
        if value < self._best - self.min_delta:
            self._best, self.epochs_without_improvement = value, 0
        else:
            self.epochs_without_improvement += 1

    def update_gradient_norm(self, norm: Tensor | float) -> None:
        """Add the norm of all gradients of a step."""
        value = number(norm)
        self._bad_norms.append(not math.isfinite(value))
        if math.isfinite(value):
            self._norms.append(value)

    def update_per_class_accuracy(self, accuracy: ClassAccuracy) -> None:
        """Add the accuracy of each class, by name or in their order; NaN for a class that had no example."""
        if isinstance(accuracy, Mapping):
            self._classes = {str(name): number(value) for name, value in accuracy.items()}
            return
        values = to_host(accuracy).tolist() if isinstance(accuracy, Tensor) else accuracy
        self._classes = {str(i): float(value) for i, value in enumerate(values)}

    def check_loss_anomaly(self, loss: Tensor | float) -> str | None:
        """What is odd about one loss, before it is added; None if nothing is.

        Example:
            >>> from trimtab import TrainingHealthMonitor
            >>> TrainingHealthMonitor().check_loss_anomaly(float("nan"))
            'the loss is nan'
        """
        value = number(loss)
        if not math.isfinite(value):
            return f"the loss is {value}"
        if 0 <= value < self._floor:  # a loss may be negative by design, but not nearly 0
            return f"the loss is {value:.3g}, below {self._floor:.3g}: is there still something to learn from?"
        if len(self._losses) >= MIN_LOSSES:
            usual = float(np.median(self._losses))
            if value - usual > (LOSS_SPIKE - 1.0) * max(abs(usual), SMALLEST_SCALE):
                return f"the loss is {value:.3g}; usually it was {usual:.3g}"
        return None

    def get_health_report(self) -> HealthReport:
        """Whether the run is healthy, what is wrong, what to try, and the numbers behind it."""
        found = [*self._loss_issues(), *self._gradient_issues(), *self._class_issues()]
        return {
            "training_healthy": not found,
            "issues": [issue for issue, _ in found],
            "recommendations": list(dict.fromkeys(advice for _, advice in found)),
            "metrics": {
                "gradient_norm": self._norm_metrics(),
                "loss": self._loss_metrics(),
                "per_class_accuracy": dict(self._classes),
            },
        }

    def _loss_issues(self) -> Iterator[tuple[str, str]]:
        if bad := sum(self._bad_losses):
            yield (
                f"{bad} of {len(self._bad_losses)} losses were NaN or Inf",
                "Lower the learning rate, and look for divisions by zero, logarithms of zero and NaN in the data.",
            )
        if self._losses and 0 <= self._losses[-1] < self._floor:
            yield (
                f"the loss is {self._losses[-1]:.3g}, below {self._floor:.3g}",
                "Check that the loss depends on the model's output, and that no labels leaked into the input.",
            )
        if self.epochs_without_improvement >= self.patience:
            yield (
                f"the loss has not improved for {self.epochs_without_improvement} epochs",
                "Stop here, lower the learning rate, or check that the weights still change.",
            )

    def _gradient_issues(self) -> Iterator[tuple[str, str]]:
        if bad := sum(self._bad_norms):
            yield (
                f"{bad} of {len(self._bad_norms)} gradient norms were NaN or Inf",
                "Skip such steps; under float16 use a GradScaler, or train in bfloat16.",
            )
        if self._norms and max(self._norms) > self._highest:
            yield (
                f"the gradient norm reached {max(self._norms):.3g}, above {self._highest:.3g}",
                "Clip gradients, for example to a norm of 1.0, or lower the learning rate.",
            )
        if self._norms and self._norms[-1] < self._lowest:
            yield (
                f"the gradient norm is {self._norms[-1]:.3g}, below {self._lowest:.3g}",
                "Check that the loss is not detached and that parameters are trainable.",
            )

    def _class_issues(self) -> Iterator[tuple[str, str]]:
        known = {name: value for name, value in self._classes.items() if math.isfinite(value)}
        if not known:
            return
        worst, best = min(known, key=known.__getitem__), max(known, key=known.__getitem__)
        if known[best] - known[worst] <= self._gap:
            return
        yield (
            f"class {worst} is right {known[worst]:.0%} of the time, class {best} {known[best]:.0%}",
            "Weight the classes in the loss, or sample the weak ones more often.",
        )

    def _norm_metrics(self) -> dict[str, float]:
        if not self._norms:
            return {}
        return {
            "average": math.fsum(self._norms) / len(self._norms),
            "maximum": max(self._norms),
            "minimum": min(self._norms),
        }

    def _loss_metrics(self) -> dict[str, float | str]:
        if not self._losses:
            return {}
        recent = list(self._losses)[-max(self.patience, MIN_LOSSES) :]
        return {
            "average": math.fsum(self._losses) / len(self._losses),
            "std": float(np.std(self._losses)),
            "trend": _trend(recent, self._steady),
        }


def _trend(recent: Sequence[float], steady: float) -> str:
    """`decreasing`, `increasing`, `stable` where the last losses hardly differ, or `fluctuating`."""
    if len(recent) < 2:
        return "unknown"
    x = np.arange(len(recent)) - (len(recent) - 1) / 2
    fall = float(x @ np.array(recent)) / float(x @ x) * (len(recent) - 1)  # of the fitted line, from first to last
    spread = float(np.std(recent))
    if spread < steady and abs(fall) < steady:
        return "stable"
    if abs(fall) > spread:
        return "decreasing" if fall < 0 else "increasing"
    return "fluctuating"


def format_health_report(report: HealthReport) -> str:
    """A health report as text, headed `TRAINING HEALTH REPORT`.

    Example:
        >>> print(format_health_report(TrainingHealthMonitor().get_health_report()))
        ============================================================
        TRAINING HEALTH REPORT
        ============================================================
        Training healthy: YES
        ============================================================
    """
    rule, metrics = "=" * 60, report["metrics"]
    families: dict[str, Mapping[str, float | str]] = {
        "Gradient norm": metrics["gradient_norm"],
        "Loss": metrics["loss"],
        "Per-class accuracy": metrics["per_class_accuracy"],
    }
    out = [rule, "TRAINING HEALTH REPORT", rule, f"Training healthy: {'YES' if report['training_healthy'] else 'NO'}"]
    for title, values in families.items():
        if values:
            out.append(f"{title}: {', '.join(f'{name} {_shown(value)}' for name, value in values.items())}")
    for title, found in (("Issues", report["issues"]), ("Recommendations", report["recommendations"])):
        if found:
            out += [f"{title}:", *(f"  - {line}" for line in found)]
    return "\n".join([*out, rule])


def _shown(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.4g}"
