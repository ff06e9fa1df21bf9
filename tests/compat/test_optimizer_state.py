"""C15: what an optimizer's moments and steps say about the gradients behind them."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from trimtab.compat.monitors import adam_state_report, update_to_parameter_ratio
from trimtab.compat.monitors.optimizer_state import HEALTHY_RATIO
from trimtab.core.errors import InputError


def trained(optimizer_class: type = torch.optim.Adam, steps: int = 5) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam])
def test_c15_healthy_moments(kind: type) -> None:
    model, optimizer = trained(kind)
    report = adam_state_report(optimizer, model)
    assert list(report) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for name, p in model.named_parameters():
        entry, second = report[name], optimizer.state[p]["exp_avg_sq"]
        assert entry.healthy
        assert (entry.num_steps, entry.numel) == (5, p.numel())
        assert (entry.smallest, entry.largest) == (float(second.min()), float(second.max()))
        assert 0 < entry.update < 2


def test_c15_the_size_of_a_step_is_what_adam_does() -> None:
    model, optimizer = trained()
    optimizer.zero_grad()
    model(torch.randn(16, 4)).square().mean().backward()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer.step()
    report = adam_state_report(optimizer, model.named_parameters())
    for name, p in model.named_parameters():
        moved = float((p.detach() - before[name]).norm()) / math.sqrt(p.numel())
        assert report[name].update * 1e-3 == pytest.approx(moved, rel=1e-3)


def test_c15_denormal_zero_and_bad_moments_are_counted() -> None:
    model, optimizer = trained()
    state = optimizer.state[model[0].weight]
    state["exp_avg_sq"].view(-1)[:7] = 1e-42
    state["exp_avg_sq"].view(-1)[7:10] = 0.0
    state["exp_avg_sq"].view(-1)[10] = math.inf
    state["exp_avg"].view(-1)[0] = math.nan
    report = adam_state_report(optimizer, model)
    entry = report["0.weight"]
    assert (entry.denormal, entry.zero, entry.nonfinite) == (7, 3, 2)
    assert not entry.healthy
    assert entry.largest == math.inf
    assert all(report[name].healthy for name in ("0.bias", "2.weight", "2.bias"))


def test_c15_gradients_that_vanished_show_as_denormals() -> None:
    weight = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([weight])
    weight.grad = torch.full((8,), 1e-20)  # squared and times 0.001 it is 1e-43
    optimizer.step()
    assert adam_state_report(optimizer)["0.0"].denormal == 8


def test_c15_nothing_to_report() -> None:
    model = nn.Linear(2, 1)
    assert adam_state_report(torch.optim.Adam(model.parameters()), model) == {}
    _, sgd = trained(torch.optim.SGD)
    assert adam_state_report(sgd) == {}
    with pytest.raises(InputError, match="got a str"):
        adam_state_report("adam")  # type: ignore[arg-type]


def test_c15_unnamed_parameters_go_by_their_place() -> None:
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([{"params": [a]}, {"params": [b]}])
    for p in (a, b):
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert list(adam_state_report(optimizer)) == ["0.0", "1.0"]


def test_c15_update_to_parameter_ratio() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
    for p in model.parameters():
        p.grad = p.detach().clone()
    with update_to_parameter_ratio(model) as update:
        torch.optim.SGD(model.parameters(), lr=1e-3).step()
    assert list(update.ratios) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(r == pytest.approx(1e-3, rel=1e-3) for r in update.ratios.values())
    assert update.total == pytest.approx(1e-3, rel=1e-3)
    assert update.healthy
    with update_to_parameter_ratio(model) as update:
        torch.optim.SGD(model.parameters(), lr=0.5).step()
    assert not update.healthy
    assert HEALTHY_RATIO == (1e-5, 1e-2)


def test_c15_update_ratio_at_the_edges() -> None:
    zero, sound = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.ones(3))
    for p in (zero, sound):
        p.grad = torch.ones(3)
    with update_to_parameter_ratio([("zero", zero), ("sound", sound)]) as update:
        torch.optim.SGD([zero, sound], lr=0.1).step()
    assert math.isnan(update.ratios["zero"])
    assert update.ratios["sound"] == pytest.approx(0.1)
    sound.grad = torch.full((3,), math.nan)
    with update_to_parameter_ratio([sound]) as update:
        torch.optim.SGD([sound], lr=0.1).step()
    assert math.isnan(update.total)
    assert not update.healthy
    with pytest.raises(ZeroDivisionError), update_to_parameter_ratio([zero]) as broken:
        raise ZeroDivisionError
    assert broken.ratios == {}
    with update_to_parameter_ratio([]) as nothing:
        pass
    assert nothing.ratios == {}
