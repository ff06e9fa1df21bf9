"""Small, seeded pieces that the guard's tests share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    # No bias before BatchNorm: its gradient is rounding noise, which Adam would blow up to full steps.
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))


def batches(num: int, bad: tuple[int, ...] = (), value: float = math.nan) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(8, 1, generator=generator)
    out = []
    for i in range(num):
        x = torch.randn(16, 8, generator=generator)
        y = x @ weight + 0.1 * torch.randn(16, 1, generator=generator)
        if i in bad:
            x[3, 2] = value
        out.append((x, y))
    return out


def mse(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


@pytest.fixture
def model() -> nn.Sequential:
    return small_model()


@pytest.fixture
def train() -> Callable[..., None]:
    """Run a guarded loop over batches: `train(guard, model, optimizer, data)`."""

    def run(guard: Any, model: nn.Module, optimizer: Any, data: list[tuple[Tensor, Tensor]]) -> None:
        for batch in data:
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()

    return run


def snapshot(model: nn.Module, optimizer: Any = None) -> list[Tensor]:
    tensors = [t.detach().clone() for t in model.state_dict().values()]
    if optimizer is not None:
        for state in optimizer.state.values():
            tensors += [v.detach().clone() for v in state.values() if isinstance(v, Tensor)]
    return tensors


def same(one: list[Tensor], two: list[Tensor]) -> bool:
    return len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
