"""The five tests that document 003 promises, by their names."""

from __future__ import annotations

import logging
import math

import pytest
import torch

from tests.train.helpers import loaders, trainer
from trimtab.checkpoint import read_checkpoint
from trimtab.compat.monitors.stability import StabilityMonitor
from trimtab.train.settings import TrainConfig, UltraOptimizedConfig


def test_gradient_clipping(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trimtab")
    seen: list[float] = []

    def note(one: object) -> None:
        grads = [p.grad for p in one.model.parameters() if p.grad is not None]
        seen.append(float(torch.nn.utils.get_total_norm(grads)))

    run = trainer(TrainConfig(num_epochs=2, max_grad_norm=0.01, lines="d2", scheduler_type="none"), before_step=note)
    history = run.train(*loaders())
    before = [row["grad_norm_avg"] for row in history.epochs]
    assert math.isclose(sum(before) / 2, sum(seen) / len(seen), rel_tol=1e-4)
    assert all(row["clipped_frac"] == 1.0 for row in history.epochs)
    said = [r.message for r in caplog.records]
    assert sum(m.startswith("Gradient norm before clipping: ") for m in said) == 16
    assert [m for m in said if m.startswith("Gradient norm after")] == ["Gradient norm after clipping: 0.010000"] * 16


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_inf_handling(bad: float) -> None:
    train, val = loaders()
    train.dataset.tensors[0][7, 2] = bad
    run = trainer(TrainConfig(num_epochs=3))
    history = run.train(train, val)
    assert run.rejected == 3, "once an epoch the bad sample comes by, and no update may come of it"
    assert [row["nonfinite_losses"] for row in history.epochs] == [1, 1, 1]
    assert all(math.isfinite(loss) for loss in history.column("train_loss"))
    assert all(bool(t.isfinite().all()) for t in run.model.state_dict().values())
    assert "nonfinite-input" in {finding.name for finding in run.findings}


def test_training_stability_monitoring() -> None:
    run = trainer(TrainConfig(num_epochs=2))
    run.train(*loaders())
    health = run.monitor_training_health()
    assert health == dict.fromkeys(health, True)
    with torch.no_grad():
        run.model[1].running_mean[0] = math.nan
    flipped = {part for part, fine in run.monitor_training_health().items() if not fine}
    assert flipped == {"model_healthy", "overall_healthy"}
    with torch.no_grad():
        run.model[1].running_mean[0] = 0.0
        run.model[0].weight[0, 0] = math.inf
    flipped = {part for part, fine in run.monitor_training_health().items() if not fine}
    assert flipped == {"parameters_healthy", "overall_healthy"}
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.1)
    with StabilityMonitor(run.model, optimizer) as monitor:
        assert monitor._check_training_stability(1.0, 1.0) == []
        assert monitor._check_training_stability(20.0, 1.0) == ["loss_explosion"]
        assert monitor.corrector.rates == pytest.approx([0.01])


def test_checkpoint_safety(tmp_path: object) -> None:
    run = trainer(TrainConfig(num_epochs=2))
    run.train(*loaders())
    saved = run.save_checkpoint(tmp_path / "one")
    assert saved.state == "candidate"
    held = read_checkpoint(tmp_path / "one")
    assert {"model_state_dict", "config", "train_history", "val_history", "optimizer_state_dict"} <= set(held)
    assert held["train_history"] == run.history.column("train_loss")
    wanted = {name: t.clone() for name, t in run.model.state_dict().items()}
    with torch.no_grad():
        run.model[0].weight[0, 0] = math.nan
    refused = run.save_checkpoint(tmp_path / "one")
    assert refused.state == "bad", "a NaN is never saved as healthy"
    assert run.load_checkpoint(tmp_path / "one") is True
    assert all(torch.equal(wanted[name], t) for name, t in run.model.state_dict().items())
    assert run.load_checkpoint(tmp_path / "nothing") is False
    (next((tmp_path / "one").glob("*.safetensors"))).write_bytes(b"torn")
    assert run.load_checkpoint(tmp_path / "one") is False


def test_full_training_cycle(tmp_path: object) -> None:
    config = UltraOptimizedConfig(num_epochs=12, batch_size=8, learning_rate=0.02, warmup_steps=10, patience=10)
    run = trainer(config)
    train, val = loaders()
    history = run.train(train, val)
    assert history.column("val_loss")[-1] < 0.15 * history.column("val_loss")[0]
    stats = run.get_training_stats()
    assert set(stats) == {
        "training_history",
        "validation_history",
        "current_learning_rate",
        "current_weight_decay",
        "total_parameters",
        "trainable_parameters",
        "device",
        "amp_enabled",
        "current_gradient_norm",
    }
    assert stats["amp_enabled"] is True
    assert len(stats["training_history"]) == len(history.epochs)
    assert stats["current_gradient_norm"] > 0
    assert run.monitor_training_health()["overall_healthy"]
    run.save_checkpoint(tmp_path / "final")
    again = trainer(config)
    assert again.load_checkpoint(tmp_path / "final")
    assert again.evaluate(val)["loss"] == run.evaluate(val)["loss"]


def test_d13_the_five_promised_tests_are_here() -> None:
    promised = ("gradient_clipping", "nan_inf_handling", "training_stability_monitoring", "checkpoint_safety")
    assert all(f"test_{name}" in globals() for name in (*promised, "full_training_cycle"))


def test_d8_a_checkpoint_without_the_optimizer(tmp_path: object) -> None:
    run = trainer(TrainConfig(num_epochs=1))
    run.train(*loaders())
    run.save_checkpoint(tmp_path / "weights", include_optimizer=False)
    assert "optimizer_state_dict" not in read_checkpoint(tmp_path / "weights")
    rate = run.last_rig.optimizer.param_groups[0]["lr"]
    run.last_rig.optimizer.param_groups[0]["lr"] = 7.0
    run.save_checkpoint(tmp_path / "all")
    run.last_rig.optimizer.param_groups[0]["lr"] = rate
    assert run.load_checkpoint(tmp_path / "all", load_optimizer=False)
    assert run.last_rig.optimizer.param_groups[0]["lr"] == rate
    assert run.load_checkpoint(tmp_path / "all")
    assert run.last_rig.optimizer.param_groups[0]["lr"] == 7.0


def test_d9_d10_before_the_first_step_as_well() -> None:
    run = trainer(TrainConfig(num_epochs=1))
    keys = ["gradients_healthy", "losses_healthy", "parameters_healthy", "model_healthy", "overall_healthy"]
    assert sorted(run.monitor_training_health()) == sorted(keys)
    stats = run.get_training_stats()
    assert stats["training_history"] == []
    assert stats["total_parameters"] == stats["trainable_parameters"] == sum(p.numel() for p in run.model.parameters())
