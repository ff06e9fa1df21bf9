"""Updates that are rounded away."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from tests.sample.loops import attached
from tests.simulated_device import simulated_device
from trimtab.sample.probes.rounding import EVERY, FIRST


def shares(rate: float, dtype: torch.dtype, *, away: bool = False, steps: int = FIRST + EVERY + 2) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4)).to(dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    with simulated_device() if away else nullcontext(), attached(model, optimizer) as (_, kept):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(32, 16, dtype=dtype)).square().mean().backward()
            optimizer.step()
    return [value for value in kept.all("rounded_away") if value is not None]


@pytest.mark.parametrize("away", [False, True])
def test_at_a_low_rate_nearly_every_update_of_bfloat16_weights_is_lost(away: bool) -> None:
    found = shares(2e-6, torch.bfloat16, away=away)
    assert len(found) == 2
    assert min(found) > 0.95


@pytest.mark.parametrize("away", [False, True])
def test_at_a_usual_rate_few_are(away: bool) -> None:
    assert max(shares(1e-2, torch.bfloat16, away=away), default=0.0) < 0.5


def test_weights_of_full_precision_are_not_looked_at() -> None:
    assert shares(2e-6, torch.float32) == []


def test_a_step_that_is_not_made_tells_nothing() -> None:
    assert shares(0.0, torch.bfloat16) == []


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, None])
def test_weights_that_are_rounded_between_steps(dtype: torch.dtype | None, away: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))
    optimizer = torch.optim.Adam(model.parameters())
    with simulated_device() if away else nullcontext(), attached(model, optimizer) as (_, kept):
        for _ in range(FIRST + EVERY + 2):
            optimizer.zero_grad()
            model(torch.randn(32, 16)).square().mean().backward()
            optimizer.step()
            if dtype is not None:
                for p in model.parameters():
                    p.data.copy_(p.data.to(dtype))
    found = [value for value in kept.all("coarse_weights") if value is not None]
    assert found == ([1.0, 1.0] if dtype is not None else [])
