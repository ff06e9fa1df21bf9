"""Dead and saturated units: judged per unit over a window of looks, only where the settings ask for it."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import trimtab
from trimtab.core.config import Config
from trimtab.core.contain import Contained
from trimtab.core.pipeline import Brain
from trimtab.core.types import NORM_COLUMNS, Kind, Layout, Sample
from trimtab.sample.probes.activations import LOOKS, ActivationTap, mark_of


def hooks_on(model: nn.Module) -> list[Any]:
    tables = [t for m in model.modules() for t in (m._forward_hooks, m._forward_pre_hooks)]
    return [hook for table in tables for _, hook in table.items()]  # `values()` does not list those of a guard


def window(tap: ActivationTap, model: nn.Module, inputs: Tensor, num: int = LOOKS) -> tuple[dict[str, Any], Any]:
    """What a window of `num` forwards on the same inputs tells; everything is looked at."""
    for _ in range(num):
        model(inputs)
    facts, notes = tap.take()
    return {k: float(v) for k, v in facts.items()}, notes


def biased(activation: nn.Module, bias: list[float], scale: float = 0.1) -> nn.Sequential:
    """A layer with one unit per bias, that hardly looks at its two inputs, before a readout."""
    model = nn.Sequential(nn.Linear(2, len(bias)), activation, nn.Linear(len(bias), 1))
    first: Any = model[0]
    with torch.no_grad():
        first.weight.mul_(scale)
        first.bias.copy_(torch.tensor(bias))
    return model


# -- dead units ------------------------------------------------------------------------------------------------------


def test_dead_units_are_counted_per_unit_and_named() -> None:
    model = biased(nn.ReLU(), [-5.0] * 12 + [5.0] * 4)
    tap = ActivationTap(model, Contained(), every=1)
    facts, notes = window(tap, model, torch.randn(16, 2))
    assert facts == {
        "dead_share": 0.75,
        "dead_lasting": 0.0,  # there is no window before it yet
        "dead_units": 12.0,
        "dead_of": 16.0,
        "dead_layer": 0.0,
        "act_layers": 1.0,
    }
    assert notes == {"dead": ("1",)}
    assert window(tap, model, torch.randn(16, 2))[0]["dead_lasting"] == 0.75
    assert tap.take() == ({}, {}), "a window is told once"


def test_a_unit_that_one_rare_sample_wakes_is_not_dead() -> None:
    model = biased(nn.ReLU(), [-5.0] * 16, scale=0.0)
    first: Any = model[0]
    with torch.no_grad():
        first.weight[:8] = torch.tensor([1.0, 0.0])  # these answer to a large first feature
    tap = ActivationTap(model, Contained(), every=1)
    usual, rare = torch.zeros(64, 2), torch.zeros(64, 2)
    rare[17, 0] = 100.0
    for i in range(LOOKS):
        model(rare if i == 3 else usual)
    assert float(tap.take()[0]["dead_share"]) == 0.5
    assert window(tap, model, usual)[0]["dead_share"] == 1.0, "a new window begins with nothing"


@pytest.mark.parametrize(
    ("activation", "silent", "active"),
    [
        (nn.ReLU(), -5.0, 5.0),
        (nn.ReLU6(), -5.0, 50.0),
        (nn.GELU(), -50.0, 5.0),
        (nn.SiLU(), -50.0, -1.0),
        (nn.ELU(), -50.0, -1.0),
        (nn.ELU(alpha=2.0), -50.0, -3.0),
        (nn.ReLU(inplace=True), -5.0, 0.01),
    ],
)
def test_what_counts_as_dead(activation: nn.Module, silent: float, active: float) -> None:
    model = biased(activation, [silent] * 10 + [active] * 6, scale=0.0)
    assert window(ActivationTap(model, Contained(), every=1), model, torch.randn(4, 2))[0]["dead_units"] == 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions(dtype: torch.dtype) -> None:
    for activation in (nn.ReLU(), nn.GELU()):
        model = biased(activation, [-50.0] * 10 + [60000.0] * 6, scale=0.0).to(dtype)
        tap = ActivationTap(model, Contained(), every=1)
        assert window(tap, model, torch.randn(400, 2, dtype=dtype))[0]["dead_units"] == 10


def test_channels_of_a_convolution_are_its_units() -> None:
    model = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(12 * 36, 2))
    conv: Any = model[0]
    with torch.no_grad():
        conv.bias[:9] = -100.0
        conv.bias[9:] = 0.0
    facts, _ = window(ActivationTap(model, Contained(), every=1), model, torch.randn(4, 1, 8, 8))
    assert (facts["dead_units"], facts["dead_of"]) == (9.0, 12.0)


def test_features_of_a_sequence_are_its_units() -> None:
    model = biased(nn.ReLU(), [-5.0] * 9 + [5.0] * 3)
    facts, _ = window(ActivationTap(model, Contained(), every=1), model, torch.randn(4, 7, 2))
    assert (facts["dead_units"], facts["dead_of"]) == (9.0, 12.0)


def test_nan_is_not_taken_for_silence() -> None:
    model = biased(nn.ReLU(), [-5.0] * 16)
    facts, _ = window(ActivationTap(model, Contained(), every=1), model, torch.full((4, 2), torch.nan))
    assert facts["dead_share"] == 0.0


def test_a_small_layer_does_not_hide_a_large_one() -> None:
    small, large = biased(nn.ReLU(), [-5.0] * 3), biased(nn.ReLU(), [-5.0] * 15 + [5.0])
    model = nn.Sequential(nn.ModuleDict({"small": small, "large": large}))
    model.forward = lambda x: small(x) + large(x)  # type: ignore[method-assign]
    tap = ActivationTap(model, Contained(), every=1)
    for _ in range(2):
        facts, notes = window(tap, model, torch.randn(4, 2))
    assert facts["dead_share"] == 1.0
    assert (facts["dead_units"], facts["dead_lasting"]) == (15.0, 15 / 16)
    assert notes["dead"][int(facts["dead_layer"])] == "0.large.1"


class Shared(nn.Module):
    """One activation after two layers of different widths, as residual blocks have it; or a varying width."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.relu = nn.Linear(2, 10), nn.Linear(10, 20), nn.ReLU()
        with torch.no_grad():
            self.two.weight.zero_()
            self.two.bias.fill_(-1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.two(self.relu(self.one(x))))


def test_calls_of_a_shared_activation_are_told_apart() -> None:
    model = Shared()
    facts, notes = window(ActivationTap(model, Contained(), every=1), model, torch.randn(32, 2))
    assert notes["dead"] == ("relu", "relu (call 2)")
    assert (facts["dead_layer"], facts["dead_units"], facts["dead_of"]) == (1.0, 20.0, 20.0)


# -- saturated units -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("activation", "limit", "inside"),
    [
        (nn.Tanh(), 4.0, 1.0),
        (nn.Sigmoid(), -6.0, 1.0),
        (nn.Sigmoid(), 6.0, -3.0),
        (nn.Softsign(), 200.0, 20.0),
        (nn.Hardtanh(), -1.5, 0.5),
        (nn.Hardtanh(-3.0, 3.0), 4.0, 2.5),
        (nn.Hardsigmoid(), 4.0, 1.0),
    ],
)
def test_what_counts_as_saturated(activation: nn.Module, limit: float, inside: float) -> None:
    model = biased(activation, [limit] * 5 + [inside] * 3, scale=0.0)
    tap = ActivationTap(model, Contained(), every=1)
    window(tap, model, torch.randn(4, 2))
    facts, notes = window(tap, model, torch.randn(4, 2))
    assert facts["saturated_share"] == facts["saturated_lasting"] == 5 / 8
    assert (facts["saturated_units"], facts["saturated_of"], notes) == (5.0, 8.0, {"saturated": ("1",)})


def test_a_unit_that_says_yes_and_no_and_maybe_is_not_saturated() -> None:
    model = biased(nn.Tanh(), [0.0] * 8, scale=0.0)
    first: Any = model[0]
    with torch.no_grad():
        first.weight[:, 0] = 10.0
    tap = ActivationTap(model, Contained(), every=1)
    inputs = torch.ones(20, 2)
    inputs[:10] *= -1.0
    assert window(tap, model, inputs)[0]["saturated_share"] == 1.0, "at either end"
    inputs[0] = 0.0
    assert window(tap, model, inputs)[0]["saturated_share"] == 0.0, "one of twenty is in between"


def test_a_certain_answer_is_not_saturation() -> None:
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())
    last: Any = model[2]
    with torch.no_grad():
        last.bias.fill_(-20.0)
    facts, notes = window(ActivationTap(model, Contained(), every=1), model, torch.randn(4, 2))
    assert notes == {"saturated": ("1",)}
    assert facts["saturated_share"] == 0.0


# -- when it looks ---------------------------------------------------------------------------------------------------


def test_every_fifth_training_forward_is_looked_at() -> None:
    model = biased(nn.ReLU(), [-5.0] * 16)
    tap = ActivationTap(model, Contained())
    assert window(tap, model, torch.randn(4, 2), num=5 * (LOOKS - 1))[0] == {}
    with torch.no_grad():
        model(torch.randn(4, 2))
    model.eval()
    model(torch.randn(4, 2))
    model.train()
    assert tap.take() == ({}, {})
    assert window(tap, model, torch.randn(4, 2), num=1)[0]["dead_units"] == 16


def test_frozen_layers_and_what_cannot_die_are_left_alone() -> None:
    model = biased(nn.ReLU(), [-5.0] * 16)
    model[0].requires_grad_(False)
    assert window(ActivationTap(model, Contained(), every=1), model, torch.randn(4, 2))[0] == {"act_layers": 0.0}
    for module in (nn.LeakyReLU(), nn.PReLU(), nn.Softplus(), nn.LSTM(2, 2), nn.GRU(2, 2), nn.Linear(2, 2)):
        assert mark_of(module) == (None, False)
    plain = nn.Sequential(nn.Linear(2, 8), nn.LeakyReLU())
    tap = ActivationTap(plain, Contained(), every=1)
    assert hooks_on(plain) == []
    assert window(tap, plain, torch.randn(4, 2)) == ({}, {})


def test_a_branch_that_is_taken_now_and_then_waits_until_it_was_seen_often_enough() -> None:
    model = biased(nn.ReLU(), [-5.0] * 16)
    whole, part = model.forward, model[0]
    tap = ActivationTap(model, Contained(), every=1)
    told = []
    for i in range(3 * LOOKS):
        model.forward = whole if i % 2 else part.forward  # type: ignore[method-assign]
        model(torch.randn(4, 2))
        told.append(tap.take()[0])
    assert [f["act_layers"] for f in told if f] == [0.0, 1.0, 0.0]


def test_a_loop_that_calls_only_the_parts_of_the_root() -> None:
    model = biased(nn.ReLU(), [-5.0] * 16)
    tap = ActivationTap(model, Contained(), every=2)
    told = []
    for _ in range(2 * LOOKS):
        model[2](model[1](model[0](torch.randn(4, 2))))
        told.append(tap.take()[0])
    assert [float(f["dead_units"]) for f in told if f] == [16.0]


def test_checkpointed_layers_are_counted_once() -> None:
    model = Shared()
    whole = model.forward
    model.forward = lambda x: checkpoint(whole, x, use_reentrant=False)  # type: ignore[assignment, return-value]
    tap = ActivationTap(model, Contained(), every=1)
    for _ in range(LOOKS):
        model(torch.randn(8, 2)).sum().backward()
    assert tap.take()[1] == {"dead": ("relu", "relu (call 2)")}


def test_nothing_waits_for_a_device() -> None:
    """Tensors of the meta device have no values: whoever asks for one fails."""
    model = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.GELU(), nn.Tanh(), nn.Linear(8, 2)).to("meta")
    tap = ActivationTap(model, Contained(), every=1)
    for _ in range(2 * LOOKS):
        model(torch.empty(4, 2, device="meta"))
    facts, notes = tap.take()
    assert all(isinstance(v, Tensor) and v.is_meta for k, v in facts.items() if k != "act_layers")
    assert notes == {"dead": ("1", "2"), "saturated": ("3",)}


def test_transformed_and_compiled_forwards_are_let_through() -> None:
    model = biased(nn.ReLU(), [-5.0] * 16)
    tap = ActivationTap(model, Contained(), every=1)
    for _ in range(LOOKS):
        torch.func.vmap(model)(torch.randn(3, 4, 2))
    assert float(tap.take()[0].get("act_layers", 0.0)) == 0.0
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    for _ in range(LOOKS):
        compiled(torch.randn(4, 2)).sum().backward()
    assert tap.take()[0] == {}
    torch._dynamo.reset()


def test_a_tap_that_breaks_is_switched_off_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(nn.ReLU):
        """Gives a tensor whose values cannot be reduced like others."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).to_sparse()

    model = nn.Sequential(nn.Linear(2, 8), Odd())
    tap = ActivationTap(model, Contained(), every=1)
    with caplog.at_level(logging.ERROR, logger="trimtab"):
        assert window(tap, model, torch.randn(4, 2)) == ({}, {})
    assert len(caplog.records) == 1


# -- hooks -----------------------------------------------------------------------------------------------------------


def test_hooks_come_off_and_copies_have_none() -> None:
    model = biased(nn.ReLU(), [-5.0] * 16)
    tap = ActivationTap(model, Contained(), every=1)
    assert len(hooks_on(model)) == 3
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert hooks_on(twin) == []
        for _ in range(LOOKS):
            twin(torch.randn(4, 2))
        assert tap.take() == ({}, {})
    tap.remove()
    assert hooks_on(model) == []


# -- through a guard -------------------------------------------------------------------------------------------------


def trained(model: nn.Module, steps: int = 110, lr: float = 0.01, **settings: Any) -> trimtab.Guard:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    guard = trimtab.Guard(model, optimizer, config={"record": False, **settings})
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        x = torch.randn(32, 2, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        guard.step(loss)
        optimizer.zero_grad()
    guard.close()
    return guard


def found_in(guard: trimtab.Guard) -> list[Any]:
    return [f for f in guard.findings if f.code in ("ACT001", "ACT002")]


def test_a_guard_names_the_dead_layer() -> None:
    guard = trained(biased(nn.ReLU(), [-5.0] * 61 + [0.0] * 3), activations=True)
    assert [f.name for f in found_in(guard)] == ["dead-units"]
    finding = found_in(guard)[0]
    assert finding.subject == ("1",)
    assert "1: 61 of 64 units" in finding.message
    assert finding.evidence == {"share": 61 / 64, "lasting": 61 / 64, "num_units": 61.0}
    assert 90 <= finding.step <= 100, "at the end of the second window"


def test_a_guard_names_the_saturated_layer() -> None:
    guard = trained(biased(nn.Tanh(), [6.0] * 15 + [0.0]), activations=True)
    assert [f.name for f in found_in(guard)] == ["saturated-units"]
    assert "1: 15 of 16 units" in found_in(guard)[0].message


@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.Sigmoid, nn.Softsign])
def test_a_healthy_network_is_silent(activation: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 32), activation(), nn.Linear(32, 32), activation(), nn.Linear(32, 1))
    assert found_in(trained(model, steps=160, activations=True)) == []


def test_a_sparsely_active_layer_is_silent() -> None:
    model = biased(nn.ReLU(), [-2.0] * 64)
    first: Any = model[0]
    with torch.no_grad():
        first.weight.copy_(nn.functional.normalize(torch.randn(64, 2)))  # each unit answers to one input in fifty
    assert found_in(trained(model, steps=160, lr=1e-4, activations=True)) == []


def test_it_is_off_by_default() -> None:
    model = biased(nn.ReLU(), [-5.0] * 64)
    guard = trimtab.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), config={"record": False})
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.children())
    guard.close()
    assert found_in(trained(model)) == []


def test_hooks_come_off_with_the_guard_and_no_bit_differs() -> None:
    ends = []
    for on in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1)
        )
        trained(model, activations=on)
        assert hooks_on(model) == []
        ends.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


# -- the rules alone -------------------------------------------------------------------------------------------------

LAYOUT = Layout(names=("a",), kinds=(Kind.GRAD,), numel=(4,), columns=NORM_COLUMNS)


def judged(word: str, config: Config | None = None, **values: float) -> list[str]:
    values = {"lasting": 0.9, "share": 0.95, "units": 61.0, "of": 64.0, "layer": 1.0, **values}
    scalars = {"loss": 1.0, "grad_norm": 1.0, **{f"{word}_{k}": v for k, v in values.items()}}
    notes = {word: ("first", "blocks.2.act")}
    sample = Sample(step=95, layout=LAYOUT, table=np.ones((1, 1), np.float32), scalars=scalars, notes=notes)
    verdict, _ = Brain.from_config(config or Config()).advance(sample, seen_at=95)
    return [f"{f.name}: {f.message}" for f in verdict.findings]


@pytest.mark.parametrize(("word", "name"), [("dead", "dead-units"), ("saturated", "saturated-units")])
def test_rules_fire_on_a_share_that_lasts(word: str, name: str) -> None:
    (text,) = judged(word)
    assert text.startswith(f"{name}: blocks.2.act: 61 of 64 units are {word}")
    assert judged(word, lasting=0.3) == []
    assert judged(word, units=3.0, of=3.0) == []
    assert judged(word, Config.from_dict({"rules": {name: {"share": 0.95}}})) == []
    assert len(judged(word, Config.from_dict({"rules": {name: {"units": 3}}}), units=3.0, of=3.0)) == 1


def test_thresholds_and_settings() -> None:
    assert judged("dead", lasting=0.5) == judged("saturated", lasting=0.8) == []
    assert len(judged("dead", lasting=0.51)) == len(judged("saturated", lasting=0.81)) == 1
    assert judged("dead", units=7.0) == []
    config = Config.from_dict({"activations": True})
    assert Config().activations is False
    assert Config.from_dict(config.to_dict()) == config
    with pytest.raises(trimtab.ConfigError, match="true or false"):
        Config.from_dict({"activations": 1})


@pytest.mark.parametrize("before", ["", "norm", "pool", "drop", "instance", "add"])
def test_channels_of_a_one_dimensional_convolution_are_its_units(before: str) -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.act, self.head = nn.Conv1d(1, 12, 3), nn.ReLU(), nn.Linear(12, 2)
            self.norm, self.instance = nn.BatchNorm1d(12, affine=False), nn.InstanceNorm1d(12)

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            dead = torch.where(torch.arange(12) < 9, -100.0, 0.0)[:, None]
            if before == "norm":
                x = self.norm(x)
            elif before == "instance":
                x = self.instance(x)
            elif before == "pool":
                x = nn.functional.max_pool1d(x, 2)
            elif before == "drop":
                x = nn.functional.dropout(x, 0.1)
            elif before == "add":
                x = x + x.flip(-1)
            out: Tensor = self.head(self.act(x + dead).mean(-1))
            return out

    facts, _ = window(ActivationTap(model := Body(), Contained(), every=1), model, torch.randn(4, 1, 30))
    assert (facts["dead_units"], facts["dead_of"]) == (9.0, 12.0)


def test_features_stay_units_where_a_convolution_came_before() -> None:
    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches, self.norm = nn.Conv1d(1, 12, 3), nn.BatchNorm1d(12)
            self.mix, self.act, self.head = nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.mix(self.patches(x).transpose(1, 2))
            x = self.norm(x.reshape(-1, 12)).reshape(x.shape)  # features of every position, normalised as one batch
            dead = torch.where(torch.arange(12) < 9, -100.0, 0.0)
            out: Tensor = self.head(self.act(x + dead))
            return out

    facts, _ = window(ActivationTap(model := Body(), Contained(), every=1), model, torch.randn(4, 1, 30))
    assert (facts["dead_units"], facts["dead_of"]) == (9.0, 12.0)
