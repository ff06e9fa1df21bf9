"""ActivationMonitor: statistics over windows, units judged one by one, nothing left in copies of a model."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trimtab.compat.monitors import ActivationMonitor, get_activation_function_recommendations
from trimtab.core.errors import InputError
from trimtab.sample.probes import activations as activity


def watched(model: nn.Module, *batches: Tensor, **settings: Any) -> ActivationMonitor:
    with ActivationMonitor(model, **settings) as monitor:
        for batch in batches:
            model(batch)
    return monitor


def biased(activation: nn.Module, bias: list[float], scale: float = 0.1) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, len(bias)), activation)
    first: Any = model[0]
    with torch.no_grad():
        first.weight.mul_(scale)
        first.bias.copy_(torch.tensor(bias))
    return model


# -- statistics ------------------------------------------------------------------------------------------------------


def test_a16_statistics_are_over_all_forwards_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    batches = [torch.randn(16, 4) for _ in range(7)]
    stats = watched(model, *batches).get_statistics()
    assert list(stats) == ["0", "1"]
    with torch.no_grad():
        whole = torch.cat([model(b) for b in batches]).double()
    got = stats["1"]
    assert set(got) == {"mean", "std", "max", "min", "sparsity", "shape"}
    assert got["shape"] == (16, 8)
    assert got["mean"] == pytest.approx(float(whole.mean()), rel=1e-6)
    assert got["std"] == pytest.approx(float(whole.std()), rel=1e-6)
    assert (got["max"], got["min"]) == (float(whole.max()), 0.0)
    assert got["sparsity"] == pytest.approx(float((whole == 0).double().mean()))
    assert 0.2 < got["sparsity"] < 0.8


def test_a16_the_past_fades_out() -> None:
    model = nn.Sequential(nn.Identity())
    monitor = watched(model, *[torch.full((4, 2), 100.0)] * 10, *[torch.ones(4, 2)] * 25, window=5)
    assert monitor.get_statistics()["0"]["max"] == 1.0
    monitor.reset()
    assert monitor.get_statistics() == {}


def test_a16_outputs_in_tuples_and_dicts() -> None:
    class Heads(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"a": x, "names": ["text"], "b": (x * 2, torch.arange(3))}

    stats = watched(Heads(), torch.ones(2, 3)).get_statistics()
    assert {name: s["mean"] for name, s in stats.items()} == {"Heads": 1.0, "Heads[1]": 2.0}
    lstm = watched(nn.LSTM(3, 5, batch_first=True), torch.randn(2, 4, 3)).get_statistics()
    assert [s["shape"] for s in lstm.values()] == [(2, 4, 5), (1, 2, 5), (1, 2, 5)]
    attention = nn.MultiheadAttention(4, 2)
    with ActivationMonitor(attention) as monitor:
        attention(*[torch.randn(3, 1, 4)] * 3)
    assert monitor.get_statistics()["MultiheadAttention"]["shape"] == (3, 1, 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a16_other_precisions_and_bad_values(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Identity())
    got = watched(model, torch.full((64, 64), 30000.0, dtype=dtype)).get_statistics()["0"]
    assert got["mean"] == pytest.approx(30000.0, rel=1e-2)
    assert got["std"] == 0.0
    bad = watched(model, torch.tensor([[1.0, math.nan]], dtype=dtype)).get_statistics()["0"]
    assert math.isnan(bad["mean"])
    assert math.isnan(bad["max"])


def test_a16_nothing_is_read_from_the_device_in_a_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> Any:
        raise AssertionError("the host asked for a value")

    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Tanh())
    monitor = ActivationMonitor(model)
    monitor.register_hooks()
    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
            patch.setattr(Tensor, name, refuse)
        for _ in range(3):
            model(torch.randn(4, 2))
    monitor.remove_hooks()
    assert len(monitor.get_statistics()) == 3, "and nothing was switched off by it"


# -- dead units ------------------------------------------------------------------------------------------------------


def test_a16_dead_units_are_found_one_by_one() -> None:
    model = biased(nn.ReLU(), [-5.0, 5.0, -5.0, 0.0])
    assert watched(model, *[torch.randn(64, 2) for _ in range(5)]).detect_dead_neurons() == {"1": [0, 2]}


@pytest.mark.parametrize("seed", range(5))
def test_a16_a_healthy_relu_is_never_dead(seed: int) -> None:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU())
    monitor = watched(model, *[torch.randn(32, 16) for _ in range(20)])
    assert monitor.get_statistics()["1"]["sparsity"] > 0.4, "half of its outputs are zero"
    assert monitor.detect_dead_neurons() == {}


def test_a16_one_small_batch_is_no_evidence() -> None:
    model = biased(nn.ReLU(), [-5.0, -5.0])
    assert watched(model, torch.randn(16, 2)).detect_dead_neurons() == {}


def test_a16_one_rare_sample_wakes_a_unit() -> None:
    model = biased(nn.ReLU(), [-5.0, -5.0])
    first: Any = model[0]
    with torch.no_grad():
        first.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    rare = torch.zeros(64, 2)
    rare[17, 0] = 100.0
    batches = [torch.zeros(64, 2)] * 7
    assert watched(model, *batches, rare, *batches).detect_dead_neurons() == {"1": [1]}
    assert watched(model, rare, *[torch.zeros(64, 2)] * 40, window=10).detect_dead_neurons() == {"1": [0, 1]}


def test_a16_the_threshold_works() -> None:
    model = biased(nn.ReLU(), [1e-4, 1.0], scale=0.0)
    monitor = watched(model, torch.randn(512, 2))
    assert monitor.detect_dead_neurons() == {}
    assert monitor.detect_dead_neurons(threshold=1e-3) == {"1": [0]}
    assert monitor.detect_dead_neurons(threshold=2.0) == {"1": [0, 1]}


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.GELU(), nn.SiLU(), nn.ELU(), nn.ELU(alpha=2.0)])
def test_a16_other_activations_that_can_die(activation: nn.Module) -> None:
    model = biased(activation, [-50.0, 1.0, -1.0 if isinstance(activation, nn.ELU) else 0.5], scale=0.0)
    assert watched(model, torch.randn(512, 2)).detect_dead_neurons() == {"1": [0]}


def test_a16_channels_are_the_units_of_convolutions() -> None:
    for conv, shape in ((nn.Conv1d(1, 6, 3), (64, 1, 20)), (nn.Conv2d(1, 6, 3), (8, 1, 9, 9))):
        with torch.no_grad():
            conv.bias[2] = -100.0  # type: ignore[index]
        model = nn.Sequential(conv, nn.ReLU())
        assert watched(model, torch.randn(*shape)).detect_dead_neurons() == {"1": [2]}


def test_a16_one_activation_may_serve_layers_of_several_widths() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow, self.act = nn.Linear(2, 8), nn.Linear(8, 3), nn.ReLU()
            with torch.no_grad():
                self.narrow.bias.copy_(torch.tensor([5.0, -100.0, 5.0]))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.act(self.narrow(self.act(self.wide(x))))
            return out

    monitor = watched(Shared(), *[torch.randn(64, 2) for _ in range(8)])
    assert monitor.detect_dead_neurons() == {"act (3 units)": [1]}


# -- saturation and shift --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "extreme"),
    [
        (nn.Sigmoid(), 50.0),
        (nn.Sigmoid(), -50.0),
        (nn.Tanh(), 50.0),
        (nn.Hardtanh(), -50.0),
        (nn.Softsign(), 5000.0),
        (nn.Hardsigmoid(), 50.0),
    ],
)
def test_a16_saturated_units(activation: nn.Module, extreme: float) -> None:
    model = biased(activation, [extreme, 0.0, 0.1])
    monitor = watched(model, torch.randn(512, 2))
    assert monitor.detect_saturation() == {"1": [0]}
    assert monitor.detect_dead_neurons() == {}
    assert watched(model, torch.randn(16, 2)).detect_saturation() == {}, "too few"


def test_a16_saturation_threshold_works() -> None:
    model = nn.Sequential(nn.Tanh())
    half = torch.cat([torch.full((256, 1), 50.0), torch.zeros(256, 1)])
    monitor = watched(model, half)
    assert monitor.detect_saturation() == {}
    assert monitor.detect_saturation(share=0.4) == {"0": [0]}
    relu = watched(nn.Sequential(nn.ReLU6()), torch.full((512, 2), 50.0))
    assert relu.detect_saturation() == {}, "not a bounded activation in the sense meant here"


def test_a16_distribution_shift_against_its_own_past() -> None:
    model = nn.Sequential(nn.Identity(), nn.ReLU())
    early = [torch.randn(64, 4) for _ in range(10)]
    same = [torch.randn(64, 4) for _ in range(10)]
    moved = [torch.randn(64, 4) + 10.0 for _ in range(10)]
    wider = [torch.randn(64, 4) * 10.0 for _ in range(10)]
    assert watched(model, *early, window=10).detect_distribution_shift() == {}, "nothing to compare with"
    assert watched(model, *early, *same, window=10).detect_distribution_shift() == {}
    shifted = watched(model, *early, *moved, window=10).detect_distribution_shift()
    assert shifted["0"]["mean_shift"] == pytest.approx(10.0, rel=0.1)
    assert shifted["0"]["std_ratio"] == pytest.approx(1.0, rel=0.1)
    spread = watched(model, *early, *same, *wider, window=10).detect_distribution_shift()
    assert spread["0"]["std_ratio"] == pytest.approx(10.0, rel=0.1)
    lax = watched(model, *early, *wider, window=10).detect_distribution_shift(threshold=20, factor=20)
    assert lax == {}
    bad = watched(model, *early, *[torch.full((4, 4), math.nan)] * 10, window=10).detect_distribution_shift()
    assert set(bad) == {"0", "1"}


def test_a16_a_constant_that_stays_constant_is_no_shift() -> None:
    model = nn.Sequential(nn.Identity())
    assert watched(model, *[torch.ones(4, 4)] * 20, window=10).detect_distribution_shift() == {}
    gone = watched(model, *[torch.randn(64, 4) for _ in range(10)], *[torch.zeros(64, 4)] * 10, window=10)
    assert gone.detect_distribution_shift()["0"]["std_ratio"] == 0.0


# -- hooks -----------------------------------------------------------------------------------------------------------


def hooks_on(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a16_hooks_come_and_go() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    monitor = ActivationMonitor(model)
    assert hooks_on(model) == 0
    monitor.register_hooks()
    monitor.register_hooks()
    assert hooks_on(model) == 2
    model(torch.ones(1, 2))
    monitor.remove_hooks()
    monitor.remove_hooks()
    assert hooks_on(model) == 0
    before = monitor.get_statistics()
    model(torch.ones(8, 2))
    assert monitor.get_statistics() == before
    with pytest.raises(ZeroDivisionError), monitor:
        raise ZeroDivisionError
    assert hooks_on(model) == 0


def test_a16_copies_of_the_model_carry_nothing() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    with ActivationMonitor(model) as monitor:
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        for other in (twin, loaded):
            other(torch.ones(3, 2))
    assert monitor.get_statistics() == {}
    assert b"trimtab" not in buffer.getvalue()


def test_a16_a_module_that_keeps_its_monitor_can_be_copied() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    monitor = ActivationMonitor(model)
    object.__setattr__(model, "watch", monitor)
    with monitor:
        model(torch.ones(3, 2))
        twin: Any = copy.deepcopy(model)
    assert twin.watch.get_statistics() == {}
    assert twin.watch._model is twin


def test_a16_listening_changes_nothing() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(8, 1), nn.Sigmoid())
    inputs = torch.randn(16, 4)
    results = []
    for monitor in (None, ActivationMonitor(model)):
        torch.manual_seed(1)
        model.zero_grad()
        if monitor is not None:
            monitor.register_hooks()
        model(inputs).sum().backward()
        results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a16_inference_mode_before_training() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    with ActivationMonitor(model) as monitor:
        with torch.inference_mode():
            model(torch.ones(4, 2))
        model(torch.ones(4, 2)).sum().backward()
    assert monitor.get_statistics()["1"]["shape"] == (4, 4)


def test_a16_what_breaks_inside_does_not_break_the_forward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trimtab.compat.monitors import activation_monitor as activations

    def broken(*args: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(activations, "take_in", broken)
    assert activity.take_in is not broken
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU())
    with ActivationMonitor(model):
        for _ in range(3):
            assert model(torch.ones(4, 2)).shape == (4, 4)
    assert caplog.text.count("looking at activations failed") == 1


def test_a16_impossible_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="the model is a int"):
        ActivationMonitor(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="window is 0"):
        ActivationMonitor(nn.ReLU(), window=0)


# -- A17 -------------------------------------------------------------------------------------------------------------


def test_a17_activation_function_recommendations() -> None:
    for problem in ("vanishing", "exploding", "dead_neurons"):
        general = get_activation_function_recommendations("linear", problem)
        assert general
        for layer in ("transformer", "Conv2d", "LSTM"):
            special = get_activation_function_recommendations(layer, problem)
            assert len(special) == len(general) + 1
            assert special[1:] == general
    assert "GELU" in get_activation_function_recommendations("MultiheadAttention", "vanishing")[0]
    with pytest.raises(InputError, match="'slow'; expected one of vanishing, exploding, dead_neurons"):
        get_activation_function_recommendations("linear", "slow")
