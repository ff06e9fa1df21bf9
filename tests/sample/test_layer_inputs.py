"""What goes into layers in the first steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from tests.sample.loops import attached
from tests.simulated_device import simulated_device
from trimtab.core.contain import Contained
from trimtab.sample.probes.layer_inputs import LayerInputs

Change = Callable[[Tensor], Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 4))


def facts(model: nn.Module, change: Change, *, away: bool = False, rows: int = 32) -> dict[str, float]:
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    names = ("data_size", "data_least", "data_offset", "first_gain", "first_size", "first_least")
    with simulated_device() if away else nullcontext(), attached(model, optimizer) as (_, kept):
        for _ in range(6):
            optimizer.zero_grad()
            model(change(torch.randn(rows, 16))).square().mean().backward()
            optimizer.step()
    assert not any(m._forward_hooks for m in model.modules() if isinstance(m, nn.Linear))
    found = {name: [v for v in kept.all(name) if v is not None] for name in names}
    assert all(len(values) < 2 for values in found.values())
    return {name: values[0] for name, values in found.items() if values}


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize(
    ("change", "size", "offset"),
    [
        (lambda x: x, 1.0, 0.2),
        (lambda x: 100.0 * x, 100.0, 0.2),
        (lambda x: x + 50.0, 50.0, 50.0),
        (lambda x: 1e-4 * x, 1e-4, 0.2),
    ],
)
def test_data_that_go_into_the_first_layer(change: Change, size: float, offset: float, away: bool) -> None:
    torch.manual_seed(0)
    found = facts(mlp(), change, away=away)
    assert found["data_size"] == pytest.approx(size, rel=0.2)
    assert found["data_least"] == pytest.approx(size, rel=0.2)
    assert found["data_offset"] == pytest.approx(offset, rel=0.5)


def test_what_layers_make_of_it() -> None:
    torch.manual_seed(0)
    usual, large = mlp(), mlp()
    with torch.no_grad():
        for p in large.parameters():
            p *= 30.0
    assert 0.3 < facts(usual, lambda x: x)["first_gain"] < 1.5
    assert facts(large, lambda x: x)["first_gain"] > 10.0


def test_behind_a_normalisation_there_are_no_raw_data() -> None:
    model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    assert "data_size" not in facts(model, lambda x: 255.0 * x)


def test_of_a_few_rows_nothing_can_be_said() -> None:
    assert facts(mlp(), lambda x: x, rows=4) == {}


def test_a_weight_that_is_computed_is_left_alone() -> None:
    torch.manual_seed(0)
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 4))
    before = normed.parametrizations.weight[0]._u.clone()
    probe = LayerInputs(normed, Contained())
    assert probe.over
    assert torch.equal(before, normed.parametrizations.weight[0]._u)
