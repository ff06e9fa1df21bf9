"""What the gradients of layers tell: equal inputs, dead units, units that are copies; on the host and on a device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.simulated_device import simulated_device
from trimtab.sample.probes import layer_gradients as layers
from trimtab.sample.probes.layer_gradients import FIRST, LayerProbe


def probe_of(model: nn.Module) -> LayerProbe:
    names, params = zip(*model.named_parameters(), strict=True)
    return LayerProbe(names, params)


def told(model: nn.Module, data: Callable[[], Tensor], *, num: int = 8, away: bool = False) -> list[dict[str, float]]:
    """The facts of some looks at a model that is trained in between, with labels that have nothing to do with it."""
    source = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe, out = probe_of(model), []
    for _ in range(num):
        optimizer.zero_grad()
        answers = model(data())
        labels = torch.randint(0, answers.shape[1], (len(answers),), generator=source)
        functional.cross_entropy(answers, labels).backward()  # type: ignore[no-untyped-call]
        facts: dict[str, float] = {}
        if away:
            later = probe.delayed(FIRST)
            assert later is not None
            later(facts, {})
        else:
            facts, _ = probe.look(FIRST)
        out.append(facts)
        optimizer.step()
    return out


def net(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), *between, nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 5))


class Forgets(nn.Module):
    """Gives every sample the mean of all."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0, keepdim=True).expand_as(x) + 1.0


def varied() -> Tensor:
    return torch.randn(16, 6)


@pytest.mark.parametrize("away", [False, True])
def test_an_input_that_no_longer_differs_is_seen_behind_the_layer_that_lost_it(away: bool) -> None:
    torch.manual_seed(2)
    with simulated_device() if away else torch.enable_grad():
        facts = told(net(nn.Tanh(), Forgets()), lambda: torch.randn(512, 6), away=away)
    assert facts[-1]["same_input"] >= 4.0
    assert facts[-1]["same_input_share"] == pytest.approx(2 / 3)
    assert facts[-1]["same_input_varied"] == 0.0


@pytest.mark.parametrize("size", [1, 2, 64])
@pytest.mark.parametrize("between", [nn.Tanh(), nn.ReLU(), nn.Sigmoid(), nn.Identity()])
def test_inputs_that_differ_are_left_alone(size: int, between: nn.Module) -> None:
    torch.manual_seed(3)
    assert not any("same_input" in facts for facts in told(net(between), lambda: torch.randn(size, 6), num=12))


def test_a_layer_in_front_of_a_single_output_tells_nothing_about_its_input() -> None:
    """The gradient has one direction there for any input, and its size has the same sign while values are far off."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Linear(32, 1))
    probe, optimizer = probe_of(model), torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(12):
        optimizer.zero_grad()
        (model(varied()) - 100.0).square().mean().backward()
        assert "same_input" not in probe.look(FIRST)[0]
        optimizer.step()


@pytest.mark.parametrize("away", [False, True])
def test_units_that_nothing_depends_on_are_counted_over_a_window(away: bool) -> None:
    torch.manual_seed(4)
    model = net(nn.ReLU())
    with torch.no_grad():
        model[0].bias[:28] = -100.0
    with simulated_device() if away else torch.enable_grad():
        facts = told(model, varied, num=2 * layers.WINDOW, away=away)
    assert [i for i, some in enumerate(facts) if "asleep_share" in some] == [layers.WINDOW - 1, 2 * layers.WINDOW - 1]
    assert facts[-1]["asleep_share"] == pytest.approx(28 / 32)
    assert facts[-1]["asleep_of"] == 32.0


def test_living_units_are_not_counted() -> None:
    torch.manual_seed(5)
    assert not any("asleep_share" in facts for facts in told(net(nn.ReLU()), varied, num=layers.WINDOW))


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("value", [0.01, 0.3])
def test_units_that_begin_alike_stay_alike(value: float, away: bool) -> None:
    torch.manual_seed(6)
    model = net(nn.Tanh())
    nn.init.constant_(model[0].weight, value)
    nn.init.constant_(model[2].weight, value)
    with simulated_device() if away else torch.enable_grad():
        facts = told(model, varied, away=away)
    assert any("twin_units" in some for some in facts) is (value > 0 and bool(torch.equal(*model[2].weight[:2])))


def test_a_layer_of_zeros_is_different_after_its_first_steps() -> None:
    torch.manual_seed(7)
    model = net(nn.Tanh())
    nn.init.zeros_(model[4].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        functional.cross_entropy(model(varied()), torch.randint(0, 5, (16,))).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert not any("twin_units" in facts for facts in told(model, varied))


@pytest.mark.parametrize("spoil", ["none", "nan", "inf", "zero", "half"])
def test_missing_and_odd_gradients_are_no_trouble(spoil: str) -> None:
    model = net(nn.Tanh())
    probe = probe_of(model)
    for _ in range(7):
        for p in model.parameters():
            p.grad = None if spoil == "none" else torch.randn_like(p)
            if p.grad is not None and spoil != "half":
                p.grad.fill_({"nan": float("nan"), "inf": float("inf"), "zero": 0.0}[spoil])
        facts, _ = probe.look(FIRST)
        assert facts.keys() <= ({"layer_input", "layer_input_least"} if spoil == "half" else set())


def sizes(model: nn.Module, data: Callable[[], Tensor], *, away: bool) -> dict[str, float]:
    """What is said of the sizes of weights and inputs, with looks as a run has them."""
    probe, found = probe_of(model), dict[str, float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for step in range(layers.FIRST + 2 * layers.EVERY + 1):
        optimizer.zero_grad()
        answers = model(data())
        functional.cross_entropy(answers, torch.arange(len(answers)) % answers.shape[1]).backward()  # type: ignore[no-untyped-call]
        if probe.is_due(step):
            later = probe.delayed(step) if away else None
            facts, _ = probe.look(step)
            if later is not None:
                later(facts, {})
            found |= facts
        optimizer.step()
    return found


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_the_size_of_inputs_is_read_off_the_gradients(size: float, away: bool) -> None:
    torch.manual_seed(8)
    with simulated_device() if away else torch.enable_grad():
        found = sizes(net(nn.Tanh()), lambda: size * torch.randn(64, 6), away=away)
    assert found["start_gain"] == pytest.approx(0.577, rel=0.05)
    if size != 1.0:  # else other layers have inputs of that size, too
        name = "layer_input" if size > 1.0 else "layer_input_least"
        assert size / 3.0 < found[name] < 3.0 * size


def test_weights_that_begin_too_large_are_seen_and_a_model_that_normalises_is_not_judged() -> None:
    torch.manual_seed(9)
    large = net(nn.ReLU())
    with torch.no_grad():
        for p in large.parameters():
            p.mul_(20.0)
    assert sizes(large, varied, away=False)["start_gain"] > 10.0
    assert "start_gain" not in sizes(net(nn.LayerNorm(32), nn.ReLU()), varied, away=False)
    assert "start_gain" not in sizes(net(nn.RMSNorm(32), nn.ReLU()), varied, away=False)
