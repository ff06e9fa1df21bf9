"""Buffers that forward passes replace, that stand beside the model, or that were copied early."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from trimtab import Guard
from trimtab.guard.buffers import BufferShadow


class Averaging(nn.Module):
    """Keeps an average by hand: every forward puts a new tensor in the place of the buffer."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        out: Tensor = self.head(x)
        return out


@pytest.mark.parametrize("nan_at", [0, 3, 50])
def test_a_replaced_buffer_is_put_back(nan_at: int) -> None:
    torch.manual_seed(0)
    model = Averaging()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.mean.clone()
    with Guard(model, optimizer, run_dir=False) as guard:
        for i in range(nan_at + 1):
            before = model.mean.clone()
            x = torch.randn(8, 4)
            if i == nan_at:
                x[0, 0] = math.nan
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            guard.step(loss)
        assert guard.rejected == 1
    assert torch.equal(model.mean, before)


def test_a_buffer_of_another_shape_gives_way_to_the_old_one() -> None:
    model = Averaging()
    shadow = BufferShadow(model)
    old = model.mean
    model.mean = torch.full((7,), math.nan)
    shadow.capture()
    shadow.put_back()
    assert model.mean is old
    assert old.tolist() == [0.0] * 4


def test_modules_beside_the_model_are_looked_after_and_not_kept_alive() -> None:
    model, norm = nn.Linear(4, 1), nn.BatchNorm1d(4)
    shadow = BufferShadow(model)
    assert len(shadow) == 0
    shadow.include([norm])
    assert len(shadow) == 3
    assert norm.running_mean is not None
    kept = norm.running_mean.clone()
    norm.running_mean.fill_(math.nan)
    shadow.capture()
    shadow.put_back()
    assert torch.equal(norm.running_mean, kept)
    del norm
    shadow.refresh()
    assert len(shadow) == 0


def test_copies_that_were_made_earlier_are_what_is_gone_back_to() -> None:
    norm = nn.BatchNorm1d(2)
    assert norm.running_mean is not None
    early = [(norm._buffers, "running_mean", torch.tensor([3.0, 4.0])), (norm._buffers, "running_var", torch.ones(5))]
    norm.running_mean.fill_(math.nan)
    shadow = BufferShadow(norm)
    shadow.go_back_to(early)  # one of them does not fit, and is left alone
    shadow.capture()
    shadow.put_back()
    assert norm.running_mean.tolist() == [3.0, 4.0]
    assert norm.running_var is not None
    assert norm.running_var.tolist() == [1.0, 1.0]


def test_putting_back_inside_a_backward_pass_does_not_disturb_it() -> None:
    norm, head = nn.BatchNorm1d(4), nn.Linear(4, 1)
    model = nn.Sequential(norm, head)
    shadow = BufferShadow(model)

    def now(p: Tensor) -> None:
        shadow.capture()
        shadow.put_back()

    head.weight.register_post_accumulate_grad_hook(now)
    model(torch.randn(8, 4)).square().mean().backward()
    assert norm.weight.grad is not None
    assert norm.running_mean is not None
    assert norm.running_mean.tolist() == [0.0] * 4
