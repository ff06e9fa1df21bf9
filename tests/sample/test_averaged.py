"""Averaged weights of every make: found, followed, and checked."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.sample.loops import attached, mlp, train
from trimtab.sample.probes.ledger import BUDGET, MIN_KEPT, AveragedProbe
from trimtab.torchutil.averaged_weights import average_mark, averaged_weights


class Shadow:
    """Keeps copies by name, as many hand-made averages do."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}


class Listed:
    def __init__(self, model: nn.Module) -> None:
        self.shadow_params = [p.detach().clone() for p in model.parameters()]


class Holder:
    def __init__(self, model: nn.Module) -> None:
        self.ema_model = copy.deepcopy(model)


MAKES = [
    AveragedModel,
    copy.deepcopy,
    Shadow,
    Listed,
    Holder,
    lambda model: {n: p.detach().clone() for n, p in model.named_parameters()},
    lambda model: [p.detach().clone() for p in model.parameters()],
]


@pytest.mark.parametrize("make", MAKES)
def test_every_make_is_understood(make: Any) -> None:
    model = mlp()
    found = averaged_weights(make(model))
    assert [t.shape for _, t in found] == [p.shape for p in model.parameters()]
    assert all(torch.equal(t, p) for (_, t), p in zip(found, model.parameters(), strict=True))
    assert len({n for n, _ in found}) == 4


class ShadowBesideModel:
    """The common hand-written class: the live model, the averages by name, and a backup while they are swapped in."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.backup: dict[str, Tensor] = {}


class ShadowModelBesideModel(nn.Module):
    """A module that holds the live model and an averaged copy."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.shadow = model, copy.deepcopy(model)


class OnlineAndEmaModel(nn.Module):
    """As in ema_pytorch: both models may be submodules."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.online_model, self.ema_model = model, copy.deepcopy(model)


class ShadowParamsBesideModel:
    """As in torch_ema and diffusers, with the live parameters kept as well."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.params = model, list(model.parameters())
        self.shadow_params = [p.detach().clone() for p in model.parameters()]
        self.collected_params: list[Tensor] | None = None


class ModuleOfTimm(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(model)


BESIDE = [ShadowBesideModel, ShadowModelBesideModel, OnlineAndEmaModel, ShadowParamsBesideModel, ModuleOfTimm, Holder]


@pytest.mark.parametrize("make", BESIDE)
def test_the_averages_are_read_and_not_the_live_model_beside_them(make: Any) -> None:
    model = mlp()
    found = averaged_weights(make(model))
    live = {p.data_ptr() for p in model.parameters()}
    assert [t.shape for _, t in found] == [p.shape for p in model.parameters()]
    assert not any(t.data_ptr() in live for _, t in found)


@pytest.mark.parametrize("make", BESIDE)
def test_the_mark_of_an_average_follows_the_averages_alone(make: Any) -> None:
    model = mlp()
    ema = make(model)
    before = average_mark(ema)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    assert average_mark(ema) == before
    with torch.no_grad():
        averaged_weights(ema)[0][1].add_(1.0)
    assert average_mark(ema) != before


def test_a_shadow_that_is_still_empty_is_not_the_live_model() -> None:
    ema = ShadowBesideModel(mlp())
    ema.shadow = {}
    assert averaged_weights(ema) == []


def test_a_copy_of_a_model_is_read_as_a_whole() -> None:
    class Wrapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.head = mlp(), nn.Linear(2, 2)

    whole = Wrapping()
    assert [t.shape for _, t in averaged_weights(whole)] == [p.shape for p in whole.parameters()]


def test_what_is_no_average_gives_nothing() -> None:
    assert averaged_weights(object()) == []
    assert averaged_weights({"decay": 0.9}) == []
    assert AveragedProbe(object()).look() == ({}, {})
    assert AveragedProbe({"step": torch.tensor(3)}).look() == ({}, {})


@pytest.mark.parametrize("make", MAKES[1:])
def test_steps_without_a_move_are_counted(make: Any) -> None:
    model = mlp()
    ema = make(model)
    probe = AveragedProbe(ema)
    first = averaged_weights(ema)[0][1]
    assert [probe.look()[0]["ema_still"] for _ in range(3)] == [1.0, 2.0, 3.0]
    with torch.no_grad():
        first.mul_(1.5)
    assert probe.look()[0] == {"ema_still": 0.0}
    assert probe.look()[0] == {"ema_still": 1.0}


def test_an_average_that_has_not_begun_is_silent() -> None:
    model = mlp()
    ema = AveragedModel(model)
    probe = AveragedProbe(ema)
    assert [probe.look()[0] for _ in range(30)] == [{}] * 30
    ema.update_parameters(model)
    assert "ema_still" in probe.look()[0]
    assert probe.look()[0]["ema_still"] >= 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_named(bad: float) -> None:
    ema = Shadow(mlp())
    probe = AveragedProbe(ema)
    ema.shadow["2.weight"][0, 0] = bad
    ema.shadow["2.bias"][0] = bad
    facts, notes = probe.look()
    assert facts["ema_bad"] == 2.0
    assert notes["ema_bad"] == ("2.weight", "2.bias")


def test_a_nan_that_stays_is_no_move() -> None:
    ema = Shadow(mlp())
    ema.shadow["2.bias"][0] = math.nan
    probe = AveragedProbe(ema)
    assert [probe.look()[0]["ema_still"] for _ in range(3)] == [1.0, 2.0, 3.0]


def test_integers_and_large_averages() -> None:
    probe = AveragedProbe({"w": torch.randn(1_000_000), "n": torch.tensor([3, 4]), "b": torch.randn(3)})
    assert probe._part.names == ["w", "b"]
    assert probe._part.size <= BUDGET + 2 * MIN_KEPT


def updated(decay: float) -> tuple[list[float | None], list[str]]:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    with attached(model, optimizer, ema=ema) as (guard, kept):
        train(model, optimizer, 60, after=lambda step: ema.update_parameters(model))
    return kept.all("ema_still"), [f.name for f in guard.findings]


def test_an_average_that_follows_is_silent_in_a_real_loop() -> None:
    still, found = updated(0.9)
    assert all(v is None or v <= 2 for v in still)
    assert found == []


def test_a_decay_of_one_never_moves() -> None:
    still, found = updated(1.0)
    assert max(v for v in still if v is not None) > 40
    assert found == ["ema-not-moving"]


def test_a_nan_in_the_average_is_found_in_a_real_loop() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ema: dict[str, Tensor] = {n: p.detach().clone() for n, p in model.named_parameters()}

    def follow(step: int) -> None:
        for name, p in model.named_parameters():
            ema[name].lerp_(p.detach(), 0.1)
        if step == 5:
            ema["0.bias"][0] = math.nan

    with attached(model, optimizer, ema=ema) as (guard, _):
        train(model, optimizer, 10, after=follow)
    assert [(f.name, f.subject) for f in guard.findings] == [("nonfinite-ema", ("0.bias",))]
