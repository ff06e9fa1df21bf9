"""An adversarial game that the judge wins, with its loss written by hand; and one that goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import trimtab


def by_softplus(answer: Tensor, *, yes: bool) -> Tensor:
    return functional.softplus(-answer if yes else answer).mean()


def by_log_sigmoid(answer: Tensor, *, yes: bool) -> Tensor:
    return -functional.logsigmoid(answer if yes else -answer).mean()


def findings(loss_of: Callable[..., Tensor], folder: Path, *, far: float, rates: tuple[float, float]) -> set[str]:
    torch.manual_seed(1)
    maker = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    judge = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 1))
    ways = [
        torch.optim.Adam(m.parameters(), lr=rate, betas=(0.5, 0.99))
        for m, rate in zip((maker, judge), rates, strict=True)
    ]
    guard = trimtab.Guard({"maker": maker, "judge": judge}, {"maker": ways[0], "judge": ways[1]}, run_dir=folder)
    for _ in range(320):
        angle = 6.28 * torch.rand(64)
        true = 2 * torch.stack([angle.cos(), angle.sin()], 1) + far
        made = maker(torch.randn(64, 8))
        ways[1].zero_grad()
        loss = loss_of(judge(true), yes=True) + loss_of(judge(made.detach()), yes=False)
        loss.backward()
        guard.step(loss, optimizer=ways[1])
        ways[0].zero_grad()
        loss = loss_of(judge(made), yes=True)
        loss.backward()
        guard.step(loss, optimizer=ways[0])
    out = {f.code for f in guard.findings}
    guard.close()
    return out


@pytest.mark.parametrize("loss_of", [by_softplus, by_log_sigmoid])
def test_said_where_the_judge_is_always_right(loss_of: Callable[..., Tensor], tmp_path: Path) -> None:
    assert "LOSS013" in findings(loss_of, tmp_path, far=12.0, rates=(1e-5, 1e-2))


@pytest.mark.parametrize("loss_of", [by_softplus, by_log_sigmoid])
def test_silent_where_the_game_goes_on(loss_of: Callable[..., Tensor], tmp_path: Path) -> None:
    assert not findings(loss_of, tmp_path, far=0.0, rates=(1e-3, 1e-3))
