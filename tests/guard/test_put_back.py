"""Weights that something puts back after each step, and constraints that write after each step as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import trimtab

Write = Callable[[nn.Module, list[Tensor]], None]


def average_the_wrong_way(model: nn.Module, start: list[Tensor]) -> None:
    for weight, average in zip(model.parameters(), start, strict=True):
        weight.lerp_(average, 0.9)


def restore(model: nn.Module, start: list[Tensor]) -> None:
    for weight, old in zip(model.parameters(), start, strict=True):
        weight.copy_(old)


def round_to_a_coarse_grid(model: nn.Module, start: list[Tensor]) -> None:
    for weight in model.parameters():
        weight.copy_((weight * 8).round() / 8)


def clamp(model: nn.Module, start: list[Tensor]) -> None:
    for weight in model.parameters():
        weight.clamp_(-0.05, 0.05)


def normalise(model: nn.Module, start: list[Tensor]) -> None:
    for weight in model.parameters():
        if weight.dim() == 2:
            weight.div_(weight.norm(dim=1, keepdim=True))


def prune(model: nn.Module, start: list[Tensor]) -> None:
    for weight, old in zip(model.parameters(), start, strict=True):
        weight.mul_(old.abs() > 0.1)


def add_noise(model: nn.Module, start: list[Tensor]) -> None:
    for weight in model.parameters():
        weight.add_(torch.randn_like(weight), alpha=1e-3)


def pull_gently(model: nn.Module, start: list[Tensor]) -> None:
    for weight, old in zip(model.parameters(), start, strict=True):
        weight.lerp_(old, 0.01)


def findings(write: Write, folder: Path, *, optimizer: str = "AdamW", rate: float = 1e-3) -> list[str]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 4))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=rate)
    guard = trimtab.Guard(model, made, run_dir=folder)
    truth = torch.randn(12, 4)
    start = [p.detach().clone() for p in model.parameters()]
    for _ in range(160):
        x = torch.randn(32, 12)
        loss = nn.functional.cross_entropy(model(x), (x @ truth).argmax(1))
        loss.backward()
        guard.step(loss)
        made.zero_grad()
        with torch.no_grad():
            write(model, start)
    out = [f.code for f in guard.findings]
    guard.close()
    return out


@pytest.mark.parametrize("write", [average_the_wrong_way, restore, round_to_a_coarse_grid])
@pytest.mark.parametrize(("optimizer", "rate"), [("AdamW", 1e-3), ("SGD", 1e-2)])
def test_said_where_nothing_is_left_of_the_steps(write: Write, optimizer: str, rate: float, tmp_path: Path) -> None:
    assert "UPD002" in findings(write, tmp_path, optimizer=optimizer, rate=rate)


@pytest.mark.parametrize("write", [clamp, normalise, prune, add_noise, pull_gently])
@pytest.mark.parametrize(("optimizer", "rate"), [("AdamW", 3e-3), ("SGD", 0.1)])
def test_constraints_are_silent(write: Write, optimizer: str, rate: float, tmp_path: Path) -> None:
    assert "UPD002" not in findings(write, tmp_path, optimizer=optimizer, rate=rate)
