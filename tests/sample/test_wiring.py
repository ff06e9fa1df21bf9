"""How model and optimizer belong together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.sample.loops import attached, loss_of, mlp, train
from trimtab.sample.probes.wiring import EARLY, EVERY, Wiring, is_due, number_of_values
from trimtab.sample.rows import Rows, parameter_names


class Tied(nn.Module):
    """An embedding whose weight is the head's as well."""

    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embed(tokens))
        return out


def rows_of(optimizer: Any, model: nn.Module) -> Rows:
    return Rows(optimizer, parameter_names(model), label="", others=())


def looked(model: nn.Module, optimizer: Any, wiring: Wiring, *steps: int) -> tuple[dict[str, float], Any]:
    """The facts of the last of these steps; the model has gradients in all of them."""
    found: tuple[dict[str, float], Any] = ({}, {})
    for step in steps:
        found = wiring.look(step, rows_of(optimizer, model))
    return found


def with_gradients(model: nn.Module) -> nn.Module:
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return model


def test_parameters_that_no_optimizer_holds() -> None:
    model = with_gradients(mlp())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    facts, notes = looked(model, optimizer, Wiring(model, [optimizer]), *EARLY)
    assert facts["unheld"] == 2.0
    assert facts["unheld_share"] == pytest.approx(27 / 67)
    assert notes["unheld"] == ("2.weight", "2.bias")
    assert "idle" not in facts


def test_one_look_is_not_enough_to_say_that_nobody_moves_them() -> None:
    model = with_gradients(mlp())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    assert looked(model, optimizer, Wiring(model, [optimizer]), EARLY[0]) == ({}, {})


def test_most_steps_are_not_looked_at() -> None:
    model = with_gradients(mlp())
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    wiring = Wiring(model, [optimizer])
    quiet = [s for s in range(100) if s not in EARLY and s % EVERY]
    assert looked(model, optimizer, wiring, *EARLY, quiet[-1]) == ({}, {})
    assert "unheld" in looked(model, optimizer, wiring, 10 * EVERY)[0]


def test_all_held_frozen_or_without_gradient_is_silent() -> None:
    model = with_gradients(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert looked(model, optimizer, Wiring(model, [optimizer]), *EARLY) == ({}, {})
    partly = torch.optim.SGD(model[0].parameters(), lr=0.1)
    model[2].requires_grad_(False)
    assert looked(model, partly, Wiring(model, [partly]), *EARLY) == ({}, {})
    model[2].requires_grad_(True)
    for p in model[2].parameters():
        p.grad = None
    assert looked(model, partly, Wiring(model, [partly]), *EARLY) == ({}, {})


def test_two_optimizers_hold_everything_together() -> None:
    model = with_gradients(mlp())
    both = [torch.optim.SGD(model[i].parameters(), lr=0.1) for i in (0, 2)]
    assert looked(model, both[0], Wiring(model, both), *EARLY) == ({}, {})


def test_an_optimizer_we_were_not_told_of_is_silent() -> None:
    model = mlp()
    known = torch.optim.SGD(model[0].parameters(), lr=0.1)
    unknown = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with attached(model, known) as (guard, kept):
        for _ in range(25):
            loss_of(model).backward()
            known.step()
            unknown.step()
            known.zero_grad()
            unknown.zero_grad()
    assert kept.all("unheld") == [None] * 25
    assert guard.findings == []


def test_a_forgotten_layer_in_a_real_loop() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 12)
    assert kept.all("unheld")[4] == 2.0
    assert kept.notes("unheld")[4] == ("2.weight", "2.bias")


def test_a_replaced_head_leaves_idle_parameters() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(8, 3)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 12)
    assert kept.all("idle")[4] == 2.0
    assert kept.all("unheld")[4] == 2.0


def test_foreign_parameters_alone_are_silent() -> None:
    model, other = with_gradients(mlp()), nn.Linear(4, 4)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    assert looked(model, optimizer, Wiring(model, [optimizer]), *EARLY) == ({}, {})


def test_a_tie_that_breaks_is_named() -> None:
    model = with_gradients(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wiring = Wiring(model, [optimizer])
    assert looked(model, optimizer, wiring, *EARLY) == ({}, {})
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    facts, notes = looked(model, optimizer, wiring, 10 * EVERY)
    assert facts["untied"] == 1.0
    assert notes["untied"] == ("embed.weight and head.weight",)


def test_a_tied_module_that_is_gone_counts_as_broken() -> None:
    model = with_gradients(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wiring = Wiring(model, [optimizer])
    del model.head
    assert looked(model, optimizer, wiring, EARLY[0])[0]["untied"] == 1.0


def test_twins_are_a_tie_that_was_broken_before() -> None:
    model = Tied(tie=False)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    with_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    facts, notes = looked(model, optimizer, Wiring(model, [optimizer]), EARLY[0])
    assert facts["untied"] == 1.0
    assert notes["untied"] == ("embed.weight and head.weight",)


@pytest.mark.parametrize("value", [None, 0.0])
def test_separate_or_constant_weights_are_no_twins(value: float | None) -> None:
    model = Tied(tie=False)
    if value is not None:
        nn.init.constant_(model.head.weight, value)
        nn.init.constant_(model.embed.weight, value)
    with_gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert looked(model, optimizer, Wiring(model, [optimizer]), *EARLY) == ({}, {})


def test_frozen_twins_are_meant() -> None:
    model = Tied(tie=False)
    with torch.no_grad():
        model.head.weight.copy_(model.embed.weight)
    model.embed.weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    assert looked(model, optimizer, Wiring(model, [optimizer]), *EARLY) == ({}, {})


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_parametrised_layers_are_not_touched(wrap: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4), wrap(nn.Linear(4, 10, bias=False)))
    buffers = {n: b.clone() for n, b in model.named_buffers()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wiring = Wiring(model, [optimizer])
    with_gradients(model)
    assert looked(model, optimizer, wiring, *EARLY, 10 * EVERY) == ({}, {})
    after = dict(model.named_buffers())
    assert after.keys() == buffers.keys()
    assert all(torch.equal(b, after[n]) for n, b in buffers.items())


def test_different_values_are_counted_up_to_two() -> None:
    assert number_of_values(torch.ones(3, 3)) == 1
    assert number_of_values(torch.tensor([1.0, 2.0, 3.0])) == 2
    assert number_of_values(torch.tensor([5.0])) == 1


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_model_can_be_wired() -> None:
    model = torch.jit.script(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with_gradients(model)
    assert looked(model, optimizer, Wiring(model, [optimizer]), *EARLY) == ({}, {})


def test_an_optimizer_that_never_steps_is_named_and_one_that_steps_rarely_is_not() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    stepped, idle = (torch.optim.SGD(part.parameters(), 0.1) for part in net)
    for every, found in ((0, True), (50, False)):
        wiring = Wiring(net, [stepped, idle])
        facts: dict[str, float] = {}
        notes: dict[str, tuple[str, ...]] = {}
        for step in range(101):
            with_gradients(net)
            if is_due(step):
                facts, notes = wiring.look(step, rows_of(stepped, net))
            stepped.step()
            if every and step % every == every - 1:
                idle.step()
        assert facts.get("unstepped") == (2.0 if found else None)
        assert notes.get("unstepped", ()) == (("1.weight", "1.bias") if found else ())
