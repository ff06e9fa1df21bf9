"""The documented tests of a training setup, on the pairs recipe: device, gradient flow, precision, diagnostics."""

from __future__ import annotations

import dataclasses
import logging
import re
from typing import Any

import pytest
import torch

from trimtab.compat.monitors.diagnostics import check_amp_underflow, setup_gradient_diagnostics, validate_training_setup
from trimtab.train.recipe import Parts, build_parts, settings_of
from trimtab.train.recipes.pairs import RECIPE
from trimtab.train.stages import amp_dtype, freeze, make_optimizer, make_scaler

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_pairs": 240, "width": 16, "heads": 2, "batch_size": 8}


def built(**given: Any) -> tuple[Parts, torch.optim.Optimizer, Any]:
    torch.set_num_threads(1)
    parts = build_parts(RECIPE, settings_of(RECIPE, {**SMALL, **given}))
    stage = parts.stages[0]
    freeze(parts.model, stage)
    return parts, make_optimizer(parts.model, stage, parts.config), next(iter(parts.train_loader))


def loss_of(parts: Parts, batch: Any) -> torch.Tensor:
    assert parts.step_fn is not None
    return parts.step_fn(parts.model, batch)


def test_e10_device_placement() -> None:
    parts, optimizer, batch = built()
    report = validate_training_setup(parts.model, optimizer, device="cpu")
    assert report.ok
    assert report.warnings == ()
    held = [p for group in optimizer.param_groups for p in group["params"]]
    assert {p.device for p in [*parts.model.parameters(), *held, *batch.values()]} == {CPU}
    away = validate_training_setup(parts.model, optimizer, device="meta")
    assert any(line.startswith("not on meta: places") for line in away.problems)


def test_e10_gradient_flow() -> None:
    parts, optimizer, batch = built()
    parts.model.train()
    loss = loss_of(parts, batch)
    assert loss.requires_grad
    assert loss.shape == ()
    loss.backward()
    idle = [name for name, p in parts.model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert idle == []
    before = {name: p.detach().clone() for name, p in parts.model.named_parameters()}
    optimizer.step()
    assert [name for name, p in parts.model.named_parameters() if torch.equal(before[name], p)] == []
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in parts.model.parameters())


def test_e10_only_what_is_tuned_gets_gradients_in_the_second_stage() -> None:
    parts, _, batch = built()
    freeze(parts.model, parts.stages[1])
    loss_of(parts, batch).backward()
    without = {name.partition(".")[0] for name, p in parts.model.named_parameters() if p.grad is None}
    assert without == {"vision"}
    groups = make_optimizer(parts.model, parts.stages[1], parts.config).param_groups
    assert sorted(group["lr"] for group in groups) == pytest.approx([2e-5, 2e-4])


@pytest.mark.parametrize(
    ("name", "dtype", "scaled"), [("bf16", torch.bfloat16, False), ("fp16", torch.float16, True), ("none", None, False)]
)
def test_e10_mixed_precision(name: str, dtype: torch.dtype | None, scaled: bool) -> None:
    parts, optimizer, batch = built(amp_dtype=name)
    stage = dataclasses.replace(parts.stages[0], scaler={"init_scale": 256.0})  # low enough not to overflow at once
    scaler = make_scaler(stage, parts.config, CPU)
    assert amp_dtype(parts.config, CPU) is dtype
    assert (scaler is not None) is scaled
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = loss_of(parts, batch)
    assert loss.dtype is torch.float32, "the criterion is computed in full precision"
    (loss if scaler is None else scaler.scale(loss)).backward()
    if scaler is not None:
        scaler.unscale_(optimizer)
    assert not check_amp_underflow(parts.model, scaler, unscaled=True).underflow
    assert all(bool(p.grad.isfinite().all()) for p in parts.model.parameters() if p.grad is not None)


def test_e10_diagnostics(caplog: pytest.LogCaptureFixture) -> None:
    parts, optimizer, batch = built()
    with caplog.at_level(logging.INFO, logger="trimtab"):
        diagnostics = setup_gradient_diagnostics(parts.model, optimizer, log_interval=1, clip_grad_norm=1.0)
        loss_of(parts, batch).backward()
        stats = diagnostics.log_gradient_stats(0)
        norm = diagnostics.apply_gradient_clipping()
        diagnostics.cleanup()
    assert stats is not None
    assert (stats["num_zero"], stats["num_none"], stats["num_nonfinite"]) == (0, 0, 0)
    assert stats["global_norm"] == pytest.approx(norm, rel=1e-5)
    assert torch.stack([p.grad.norm() for p in parts.model.parameters() if p.grad is not None]).norm() < 1.001
    assert stats["parameters"].keys() == {name for name, _ in parts.model.named_parameters()}
    assert re.search(r"\[GRAD\] Step    0 \| Global: \d", caplog.text)
