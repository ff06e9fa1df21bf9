"""A run whose updates never reach the weights, or whose gradients are NaN, is never called healthy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from trimtab import Guard
from trimtab.record.reader import read_run
from trimtab.report.summary import Health, Summary, summarise

SILENT = {"ignore": ["AMP", "GRAD", "LOSS", "WGT", "UPD", "DATA", "OPT"]}


def train(
    folder: Path,
    *,
    steps: int,
    overflows: range = range(0),
    scaler: torch.amp.GradScaler | None = None,
    fused: bool = False,
    bad: float = float("inf"),
    **settings: Any,
) -> tuple[Guard, Summary]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=fused)
    guard = Guard(model, optimizer, scaler=scaler, run_dir=folder, **settings)
    for i in range(steps):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(i))
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if i in overflows:
            assert model[0].weight.grad is not None
            model[0].weight.grad[0, 0] = bad
        guard.step(loss)
        optimizer.zero_grad()
    guard.close()
    assert guard.run_dir is not None
    return guard, summarise(read_run(guard.run_dir))


def stubborn() -> torch.amp.GradScaler:
    """Backs off by next to nothing: its scale says nothing of how often it skips."""
    return torch.amp.GradScaler("cpu", init_scale=65536.0, backoff_factor=0.99999, growth_interval=10**6)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_lets_no_step_through_is_found(fused: bool, bad: float, tmp_path: Path) -> None:
    guard, summary = train(tmp_path, steps=60, overflows=range(60), scaler=stubborn(), fused=fused, bad=bad)
    assert [f.name for f in guard.findings] == ["scale-collapse"]
    assert guard.findings[0].step <= 40
    assert summary.health is Health.SICK
    health = guard.health()
    assert (health["overall_healthy"], health["parameters_healthy"], health["applied"]) == (False, False, 0)


def test_a_scaler_that_skips_most_steps_is_found(tmp_path: Path) -> None:
    guard, summary = train(tmp_path, steps=100, overflows=range(20, 95), scaler=stubborn())
    assert [f.name for f in guard.findings] == ["scale-collapse"]
    assert summary.health is not Health.HEALTHY


def test_a_scaler_that_looks_for_its_scale_is_healthy(tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    guard, summary = train(tmp_path, steps=80, overflows=range(12), scaler=scaler)
    assert guard.findings == []
    assert summary.health is Health.HEALTHY
    assert guard.health()["overall_healthy"]
    assert guard.health()["applied"] == 68


@pytest.mark.parametrize("scaled", [True, False])
def test_silenced_rules_make_no_run_healthy(scaled: bool, tmp_path: Path) -> None:
    scaler = stubborn() if scaled else None
    guard, summary = train(tmp_path, steps=30, overflows=range(30), scaler=scaler, config=SILENT)
    assert guard.findings == []
    assert summary.health is Health.SICK
    assert "not one update reached the weights" in summary.headline
    assert not guard.health()["overall_healthy"]


def test_nan_norms_that_nobody_reports_are_not_healthy(tmp_path: Path) -> None:
    guard, summary = train(
        tmp_path, steps=30, overflows=range(10, 12), bad=float("nan"), config={**SILENT, "mode": "observe"}
    )
    assert guard.findings == []
    assert summary.health is Health.SICK
    assert "gradient norms were NaN or Inf" in summary.headline


def test_a_run_without_a_step_is_nothing(tmp_path: Path) -> None:
    _, summary = train(tmp_path, steps=0)
    assert summary.health is Health.EMPTY
    assert summary.headline == "No training step was recorded."


def loop(
    folder: Path | bool,
    steps: int,
    *,
    scaler: torch.amp.GradScaler | None = None,
    step: bool | int = False,
    zero: str = "none",
    backward: bool = True,
    training: bool = True,
) -> Guard:
    """A loop of the user's own, with a guard that was told nothing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).train(training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    guard = Guard.attach(model, optimizer, run_dir=folder)
    for i in range(steps):
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(i))
        if zero == "first":
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :4].argmax(1))
        if backward:
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is not None:
            assert model[0].weight.grad is not None
            model[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
        if step is True or (step and i < step):
            optimizer.step()
        if zero in ("none", "in place"):
            optimizer.zero_grad(set_to_none=zero == "none")
    guard.close()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    return guard


@pytest.mark.parametrize("zero", ["none", "in place", "first"])
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("steps", [20, 120])
def test_a_loop_that_never_steps_is_found_though_no_hook_of_the_optimizer_runs(
    steps: int, scaled: bool, zero: str, tmp_path: Path
) -> None:
    guard = loop(tmp_path, steps, scaler=stubborn() if scaled else None, zero=zero)
    assert [f.name for f in guard.findings] == ["weights-unchanged"]
    assert guard.findings[0].evidence["passes"] in (min(steps - 8, 50), min(steps - 7, 50))
    assert "no optimizer step was ever made" in guard.findings[0].message
    assert not guard.health()["overall_healthy"]
    assert guard.run_dir is not None
    assert summarise(read_run(guard.run_dir)).health is Health.SICK


@pytest.mark.parametrize(
    "healthy",
    [
        {"backward": False},  # features are collected, or an agent acts
        {"zero": "never"},  # gradients are added up, for 120 batches
        {"training": False},  # gradients of a model that is not trained: importance, attacks
        {"step": True},
    ],
)
def test_gradients_that_nobody_throws_away_are_no_finding(healthy: dict[str, Any]) -> None:
    assert loop(False, 120, **healthy).findings == []


def test_a_loop_that_no_longer_steps_is_found() -> None:
    guard = loop(False, 200, step=40)
    assert [(f.name, f.step) for f in guard.findings] == [("weights-unchanged", 40)]
    assert "no optimizer step since step 39" in guard.findings[0].message


def test_some_gradients_that_are_only_looked_at_are_no_finding() -> None:
    assert loop(False, 70, step=40).findings == []


def test_two_models_that_train_in_turns() -> None:
    torch.manual_seed(0)
    first, second = nn.Linear(8, 8), nn.Linear(8, 4)
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2) for m in (first, second)]
    guards = [Guard.attach(m, o, run_dir=False) for m, o in zip((first, second), optimizers, strict=True)]
    for i in range(300):
        x = torch.randn(32, 8)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(second(first(x)), x[:, :4].argmax(1)).backward()
        optimizers[i // 120 % 2].step()
    for guard in guards:
        guard.close()
        assert guard.findings == []


def test_a_look_at_the_gradients_before_training_is_no_finding() -> None:
    assert loop(False, 11).findings == []


def test_a_resumed_guard_knows_what_was_applied(tmp_path: Path) -> None:
    guard, _ = train(tmp_path / "a", steps=12, overflows=range(3), scaler=stubborn())
    state = guard.state_dict()
    other, _ = train(tmp_path / "b", steps=0, scaler=stubborn())
    other.load_state_dict(state)
    assert other.health()["applied"] == guard.health()["applied"] == 9
