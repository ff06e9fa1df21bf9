"""One NaN in one sample at step 60: every optimizer, scaler or not, accumulation or not, through Guard and hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.matrix import sampled
from trimtab import Guard

STEPS, BAD = 160, 60

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum SGD": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
}


@dataclass(frozen=True)
class Setting:
    optimizer: str
    scaler: bool
    accumulate: int


@dataclass
class Outcome:
    losses: list[float]
    before: list[Tensor]
    after: list[Tensor]
    final: list[Tensor]
    guard: Guard | None


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    tensors = list(model.state_dict().values())
    for state in optimizer.state.values():
        tensors += [v for v in state.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in tensors]


def run(setting: Setting, *, bad: bool, way: str | None) -> Outcome:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 1))
    optimizer = OPTIMIZERS[setting.optimizer](model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10) if setting.scaler else None
    guard = Guard.attach(model, optimizer, scaler=scaler, run_dir=False) if way is not None else None
    truth = torch.randn(8, 1)
    losses: list[float] = []
    before: list[Tensor] = []
    after: list[Tensor] = []
    for step in range(STEPS):
        if step == BAD:
            before = everything(model, optimizer)
        for micro in range(setting.accumulate):
            x = torch.randn(32, 8)
            y = x @ truth + 0.5 * torch.randn(32, 1)
            if bad and step == BAD and micro == setting.accumulate // 2:
                x[5, 3] = math.nan
            loss = (model(x) - y).square().mean()
            part = loss / setting.accumulate
            (part if scaler is None else scaler.scale(part)).backward()
            if guard is not None and (way != "guard" or micro < setting.accumulate - 1):
                guard.observe(loss=loss)
        if guard is not None and way == "guard":
            guard.step(loss)
        elif scaler is not None:
            if way == "hooks after unscale":
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        if step == BAD:
            after = everything(model, optimizer)
    if guard is not None:
        guard.close()
    return Outcome(losses, before, after, everything(model, optimizer), guard)


@cache
def clean(setting: Setting) -> Outcome:
    return run(setting, bad=False, way=None)


def end_loss(outcome: Outcome) -> float:
    return sum(outcome.losses[-30:]) / 30


SETTINGS = [Setting(o, s, a) for o in OPTIMIZERS for s in (False, True) for a in (1, 4)]


CASES = {
    f"{s.optimizer}-scaler{int(s.scaler)}-acc{s.accumulate}-{way}": (s, way)
    for s in SETTINGS
    for way in ("guard", "hooks", *(["hooks after unscale"] if s.scaler else []))
}
USUAL = (
    "SGD-scaler0-acc1",
    "SGD-scaler1-acc4-guard",
    "AdamW-scaler1-acc1",
    "AdamW fused-scaler1-acc4-hooks after",
    "RMSprop-scaler0-acc1-hooks",
)


@pytest.mark.parametrize(("setting", "way"), sampled(CASES, [name for name in CASES if name.startswith(USUAL)]))
def test_survives(setting: Setting, way: str) -> None:
    outcome = run(setting, bad=True, way=way)
    guard = outcome.guard
    assert guard is not None
    assert guard.rejected == 1
    for was, now in zip(outcome.before, outcome.after, strict=True):
        assert torch.equal(was, now), "the rejected step must leave no trace"
    assert all(torch.isfinite(t).all() for t in outcome.final)
    assert end_loss(outcome) == pytest.approx(end_loss(clean(setting)), rel=0.05)
    assert {f.step for f in guard.findings} == {BAD}
    assert {"nonfinite-loss", "nonfinite-gradient"} <= {f.name for f in guard.findings}


@pytest.mark.parametrize("name", sampled(list(OPTIMIZERS), "SGD AdamW"))
def test_the_control_arm_fails(name: str) -> None:
    """Without the guard the same sample ruins the run: otherwise the proof above would be empty."""
    outcome = run(Setting(name, False, 1), bad=True, way=None)
    assert not all(torch.isfinite(t).all() for t in outcome.final)
    assert math.isnan(outcome.losses[-1])


def test_a_scaler_alone_does_not_save_the_buffers() -> None:
    outcome = run(Setting("AdamW", True, 1), bad=True, way=None)
    assert not all(torch.isfinite(t).all() for t in outcome.final)
