"""One call after the backward pass: measured, logged on the cadence, clipped if asked."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.compat.monitors import GradientHealthMonitor, check_and_log_gradients, integrate_health_checks
from trimtab.compat.monitors.norm_functions import compute_global_gradient_norm
from trimtab.core.errors import InputError


class Logger:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))


class Module(nn.Module):
    """What a LightningModule looks like from here."""

    def __init__(self, logger: Any = None) -> None:
        super().__init__()
        self.net, self.logger = nn.Linear(4, 1), logger

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def backward(self, scale: float = 1.0) -> Tensor:
        self.zero_grad()
        loss = (scale * (self(torch.randn(8, 4)) - 1.0).square()).mean()
        loss.backward()
        return loss


def test_a25_check_and_log_gradients_clips_only_when_asked() -> None:
    model = Module()
    model.backward(1e4)
    before = compute_global_gradient_norm(model)
    stats = check_and_log_gradients(model, step=0)
    assert "grad_norm_after_clip" not in stats
    assert compute_global_gradient_norm(model) == before
    stats = check_and_log_gradients(model, step=1, apply_clipping=True, max_grad_norm=0.5)
    assert stats["global_grad_norm"] == pytest.approx(before, rel=1e-6)
    assert stats["grad_norm_after_clip"] == 0.5
    assert compute_global_gradient_norm(model) == pytest.approx(0.5, rel=1e-4)


def test_a25_the_norm_after_clipping_is_no_constant() -> None:
    model = Module()
    model.backward(1e-3)
    stats = check_and_log_gradients(model, step=0, apply_clipping=True)
    assert stats["grad_norm_after_clip"] == pytest.approx(stats["global_grad_norm"], rel=1e-6)
    assert stats["grad_norm_after_clip"] < 0.1
    model.backward(math.nan)
    assert math.isnan(check_and_log_gradients(model, step=1, apply_clipping=True)["grad_norm_after_clip"])


def test_a25_a_given_monitor_keeps_the_count_and_a_model_gets_one() -> None:
    model = Module()
    monitor = GradientHealthMonitor(model, log_frequency=2)
    logger, other = Logger(), Logger()
    for step in range(6):
        model.backward()
        check_and_log_gradients(monitor, step, logger=logger)
        check_and_log_gradients(model, step, logger=other)
    assert [step for _, step in logger.calls] == [0, 2, 4]
    assert [step for _, step in other.calls] == [0], "the default cadence is 100 steps"
    assert monitor.step_counter == 6
    with pytest.raises(InputError, match="got a list"):
        check_and_log_gradients([model], 0)  # type: ignore[arg-type]


def test_a25_nothing_keeps_a_model_alive() -> None:
    model = Module()
    model.backward()
    check_and_log_gradients(model, step=0)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a26_integrate_health_checks_clips_every_step_and_logs() -> None:
    logger = Logger()
    model = Module(logger)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(60):
        loss = model.backward(1e3)
        stats = integrate_health_checks(model, loss, step)
        assert stats["loss_finite"] is True
        assert compute_global_gradient_norm(model) <= 1.0001
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.2 * losses[0], "without clipping this diverges"
    assert logger.calls[0][1] == 0
    assert "grad/global_norm" in logger.calls[0][0]


def test_a26_without_clipping_gradients_stay_as_they_are() -> None:
    model = Module()
    loss = model.backward(1e3)
    before = compute_global_gradient_norm(model)
    integrate_health_checks(model, loss, 0, apply_gradient_clipping=False)
    assert compute_global_gradient_norm(model) == before > 1.0


def test_a26_a_bad_loss_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = Module()
    loss = model.backward(math.nan)
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        stats = integrate_health_checks(model, loss, 7)
    assert stats["loss_finite"] is False
    assert stats["has_nan"] is True
    assert stats["recommendations"][0].startswith("CRITICAL: the loss is nan at step 7")
    assert "the loss is nan" in caplog.text
    with pytest.raises(InputError, match="shape"):
        integrate_health_checks(model, torch.ones(3), 0)


def test_a26_the_modules_own_monitor_is_used_and_odd_loggers_are_left_alone() -> None:
    model = Module(logger="not a logger")
    model.grad_monitor = GradientHealthMonitor(model)  # type: ignore[assignment]
    integrate_health_checks(model, model.backward(), 0)
    monitor: Any = model.grad_monitor
    assert monitor.step_counter == 1

    class Detached(Module):
        @property
        def logger(self) -> Any:
            raise RuntimeError("not attached to a Trainer")

        @logger.setter
        def logger(self, value: Any) -> None:
            pass

    alone = Detached()
    assert integrate_health_checks(alone, alone.backward(), 0)["loss_finite"]
