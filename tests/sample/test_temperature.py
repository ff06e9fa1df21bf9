"""A learnable temperature is found by its name and told as a factor of the logits."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tests.sample.loops import attached, batch
from trimtab.sample.probes.wiring import SEARCH_EVERY, TemperatureProbe


def probe(**values: float) -> TemperatureProbe:
    return TemperatureProbe(list(values), [nn.Parameter(torch.tensor(v)) for v in values.values()])


@pytest.mark.parametrize(
    ("name", "value", "factor"),
    [
        ("logit_scale", math.log(14.3), 14.3),  # the logarithm, as CLIP keeps it
        ("clip.logit_scale", math.log(1 / 0.07), 1 / 0.07),
        ("logit_scale", 50.0, 50.0),  # far too large for a logarithm: the factor itself
        ("temperature", 0.07, 1 / 0.07),
        ("loss.temp", 0.5, 2.0),
        ("tau", 0.1, 10.0),
        ("inv_temp", 20.0, 20.0),
        ("log_temperature", math.log(0.1), 10.0),
    ],
)
def test_the_factor(name: str, value: float, factor: float) -> None:
    facts, notes = probe(**{name: value}).look(0)
    assert facts["temperature"] == pytest.approx(factor, rel=1e-5)
    assert notes["temperature"] == (name,)


def test_the_factor_farthest_from_one_is_told() -> None:
    facts, notes = probe(temperature=0.5, logit_scale=math.log(100.0)).look(0)
    assert facts["temperature"] == pytest.approx(100.0, rel=1e-5)
    assert notes["temperature"] == ("logit_scale",)
    facts, notes = probe(temperature=1e5, logit_scale=math.log(100.0)).look(0)
    assert facts["temperature"] == pytest.approx(1e-5, rel=1e-5)
    assert notes["temperature"] == ("temperature",)


@pytest.mark.parametrize(
    "tensor", [torch.zeros(3), torch.zeros((), dtype=torch.int64), torch.zeros((), dtype=torch.complex64)]
)
def test_only_single_real_numbers_count(tensor: Tensor) -> None:
    assert TemperatureProbe(["temperature"], [tensor]).look(0) == ({}, {})


def test_other_names_do_not_count() -> None:
    assert probe(bias=0.1, scale=3.0).look(0) == ({}, {})
    assert TemperatureProbe(["temperature.weight"], [torch.tensor(0.1)]).look(0) == ({}, {})
    assert TemperatureProbe([], []).look(0) == ({}, {})


def test_it_is_read_now_and_then() -> None:
    one = probe(tau=0.1)
    assert [bool(one.look(step)[0]) for step in range(2 * SEARCH_EVERY)] == [
        step % SEARCH_EVERY == 0 for step in range(2 * SEARCH_EVERY)
    ]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_left_to_other_rules(bad: float) -> None:
    assert probe(temperature=bad).look(0) == ({}, {})
    parameter = nn.Parameter(torch.tensor(0.5))
    one = TemperatureProbe(["temperature"], [parameter])
    parameter.data.fill_(bad)
    assert one.look(0) == ({}, {})


@pytest.mark.parametrize("value", [0.0, 1e30, -1e30, 1e-30])
def test_extreme_values_give_a_number(value: float) -> None:
    for name in ("tau", "logit_scale", "inv_temp"):
        factor = probe(**{name: value}).look(0)[0]["temperature"]
        assert math.isfinite(factor)
        assert factor >= 0


def test_in_a_real_loop() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 3)
            self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.body(x) * self.logit_scale.exp()
            return out

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with attached(model, optimizer) as (_, kept):
        for _ in range(6):
            model(batch()[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert kept.all("temperature")[0] == pytest.approx(10.0, rel=1e-5)
    assert kept.all("temperature")[1] is None
    assert kept.notes("temperature")[5] == ("logit_scale",)
