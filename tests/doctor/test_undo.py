"""Nothing that a training keeps is different afterwards, wherever it keeps it."""

from __future__ import annotations

import copy
import random

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from tests.doctor.kit import data, look
from trimtab.torchutil.undo import Memory


def test_everything_a_step_keeps_is_put_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / 10))
    average = AveragedModel(model)
    noise = torch.Generator().manual_seed(3)
    seen: list[float] = []
    count = {"calls": 0}

    def step(model, batch):
        count["calls"] += 1
        optimizer.zero_grad()
        x = batch[0] + 0.01 * torch.randn(batch[0].shape, generator=noise)
        loss = cross_entropy(model(x), batch[1])
        loss.backward()
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        seen.append(loss.item())
        random.random()
        np.random.rand()
        return loss

    step(model, data()[0])  # in the middle of a run: there are moments, gradients, statistics
    parts = (model, optimizer, scheduler, average)
    before = [copy.deepcopy(part.state_dict()) for part in parts]
    grads = [p.grad.clone() for p in model.parameters()]
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), noise.get_state())
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    report = look(
        {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "ema": average,
            "loader": data(),
            "step_fn": step,
        }
    )
    assert report.ok
    for part, was in zip(parts, before, strict=True):
        same(part.state_dict(), was)
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()
    assert torch.equal(noise.get_state(), states[3])
    assert count == {"calls": 1}
    assert len(seen) == 1
    assert hooks == [len(m._forward_pre_hooks) for m in model.modules()]
    assert all(m.training for m in model.modules())
    assert "step" not in vars(scheduler)


def same(a, b) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        for one, other in zip(a, b, strict=True):
            same(one, other)
    else:
        assert a == b


def test_memory_restores_modules_in_closures_and_their_plain_attributes():
    hidden = nn.Linear(2, 2)
    hidden.calls = 0
    hidden.state = torch.zeros(2)

    def step():
        return hidden

    memory = Memory(step)
    weight = hidden.weight.detach().clone()
    with torch.no_grad():
        hidden.weight.add_(1.0)
        hidden.state.add_(1.0)
    hidden.calls = 7
    hidden.extra = "new"
    memory.undo()
    assert torch.equal(hidden.weight, weight)
    assert hidden.calls == 0
    assert torch.equal(hidden.state, torch.zeros(2))
    assert not hasattr(hidden, "extra")
