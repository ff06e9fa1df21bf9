"""TrainingHealthMonitor: what it is told, what it makes of it, and the report."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from trimtab.compat.monitors.training_health import TrainingHealthMonitor, format_health_report
from trimtab.core.errors import InputError

NAN, INF = float("nan"), float("inf")


def told(*losses: float, norms: tuple[float, ...] = (), **settings: Any) -> TrainingHealthMonitor:
    monitor = TrainingHealthMonitor(**settings)
    for loss in losses:
        monitor.update_epoch_loss(loss)
    for norm in norms:
        monitor.update_gradient_norm(norm)
    return monitor


def test_e15_report_of_a_healthy_run() -> None:
    monitor = told(3.0, 2.0, 1.0, norms=(1.0, 2.0, 3.0))
    monitor.update_per_class_accuracy({"first": 0.9, "second": 0.8, "similar": 0.7})
    assert monitor.get_health_report() == {
        "training_healthy": True,
        "issues": [],
        "recommendations": [],
        "metrics": {
            "gradient_norm": {"average": 2.0, "maximum": 3.0, "minimum": 1.0},
            "loss": {"average": 2.0, "std": pytest.approx(math.sqrt(2 / 3)), "trend": "decreasing"},
            "per_class_accuracy": {"first": 0.9, "second": 0.8, "similar": 0.7},
        },
    }


def test_e15_a_run_that_has_said_nothing_is_healthy() -> None:
    report = told().get_health_report()
    assert report["training_healthy"]
    assert report["metrics"] == {"gradient_norm": {}, "loss": {}, "per_class_accuracy": {}}


@pytest.mark.parametrize(
    ("losses", "norms", "word"),
    [
        ((1.0, NAN, 0.9), (), "1 of 3 losses were NaN or Inf"),
        ((1.0, 1e-9), (), "below 1e-08"),
        ((1.0,), (1.0, 301.0, 1.0), "reached 301, above 300"),
        ((1.0,), (1.0, 1e-13), "below 1e-12"),
        ((1.0,), (1.0, INF), "1 of 2 gradient norms were NaN or Inf"),
        ((1.0, 0.9, *[0.9] * 5), (), "not improved for 5 epochs"),
    ],
)
def test_e15_each_trouble_is_one_issue_with_advice(losses: Any, norms: Any, word: str) -> None:
    report = told(*losses, norms=norms).get_health_report()
    assert not report["training_healthy"]
    (issue,) = report["issues"]
    assert word in issue
    assert len(report["recommendations"]) == 1


def test_e15_bounds_are_not_crossed_by_standing_on_them() -> None:
    assert told(1.0, 1e-8, norms=(300.0, 1e-12)).get_health_report()["training_healthy"]


def test_e15_patience_counts_epochs_without_a_clear_improvement() -> None:
    monitor = told(1.0, *[1.0 - 1e-5 * i for i in range(1, 6)], patience=5, min_delta=1e-4)
    assert monitor.epochs_without_improvement == 5
    monitor.update_epoch_loss(0.9)
    assert monitor.epochs_without_improvement == 0
    assert monitor.get_health_report()["training_healthy"]
    slow = told(1.0, *[1.0 - 1e-5 * i for i in range(1, 6)], patience=5, min_delta=0.0)
    assert slow.epochs_without_improvement == 0


def test_e15_nan_poisons_no_average() -> None:
    metrics = told(1.0, NAN, 3.0, INF, norms=(1.0, NAN, 3.0)).get_health_report()["metrics"]
    assert metrics["loss"]["average"] == 2.0
    assert metrics["gradient_norm"] == {"average": 2.0, "maximum": 3.0, "minimum": 1.0}


def test_e15_memory_is_bounded_and_old_trouble_is_forgotten() -> None:
    monitor = told(NAN, 5.0, 4.0, 3.0, 2.0, window=3, norms=(INF, 1e9, 1.0, 1.0, 1.0))
    report = monitor.get_health_report()
    assert report["training_healthy"]
    assert report["metrics"]["loss"]["average"] == 3.0


def test_e15_class_gap() -> None:
    monitor = TrainingHealthMonitor()
    monitor.update_per_class_accuracy(torch.tensor([0.9, NAN, 0.55]))
    (issue,) = monitor.get_health_report()["issues"]
    assert issue == "class 2 is right 55% of the time, class 0 90%"
    monitor.update_per_class_accuracy([0.9, 0.65])
    assert monitor.get_health_report()["training_healthy"]
    monitor.update_per_class_accuracy([NAN])
    assert monitor.get_health_report()["training_healthy"]
    wide = TrainingHealthMonitor(class_accuracy_gap=0.5)
    wide.update_per_class_accuracy([0.9, 0.5])
    assert wide.get_health_report()["training_healthy"]


@pytest.mark.parametrize(
    ("losses", "trend"),
    [
        ((1.0,), "unknown"),
        ((3.0, 2.0, 1.0), "decreasing"),
        ((1.0, 2.0, 3.0), "increasing"),
        ((1.0, 1.01, 0.99, 1.0), "stable"),
        ((1.0, 2.0, 1.0, 2.0, 1.0), "fluctuating"),
    ],
)
def test_e15_trend(losses: tuple[float, ...], trend: str) -> None:
    assert told(*losses).get_health_report()["metrics"]["loss"]["trend"] == trend


@pytest.mark.parametrize(
    ("loss", "word"), [(NAN, "nan"), (INF, "inf"), (1e-9, "below 1e-08"), (torch.tensor(50.0), "usually it was 1")]
)
def test_e15_loss_anomaly(loss: Any, word: str) -> None:
    said = told(1.0, 1.0, 1.0).check_loss_anomaly(loss)
    assert said is not None
    assert word in said


@pytest.mark.parametrize("loss", [1.0, 9.0, -3.0])
def test_e15_an_ordinary_loss_is_no_anomaly(loss: float) -> None:
    monitor = told(1.0, 1.0, 1.0)
    assert monitor.check_loss_anomaly(loss) is None
    assert monitor.get_health_report()["metrics"]["loss"]["average"] == 1.0  # asking takes nothing in


def test_e15_the_report_as_text() -> None:
    monitor = told(1.0, NAN, norms=(2.0,))
    monitor.update_per_class_accuracy([0.9, 0.2])
    text = format_health_report(monitor.get_health_report())
    assert text.splitlines()[1] == "TRAINING HEALTH REPORT"
    assert "Training healthy: NO" in text
    assert "Gradient norm: average 2, maximum 2, minimum 2" in text
    assert "Loss: average 1, std 0, trend unknown" in text
    assert "Per-class accuracy: 0 0.9, 1 0.2" in text
    assert "  - 1 of 2 losses were NaN or Inf" in text
    assert "Recommendations:" in text


@pytest.mark.parametrize("settings", [{"patience": 0}, {"min_delta": -1.0}, {"window": 1}])
def test_e15_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected at least"):
        TrainingHealthMonitor(**settings)
