"""What the calls of the root module show, and what a copied model carries of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.sample.loops import attached, batch, is_inert, loss_of, mlp, train
from trimtab import Guard
from trimtab.core.contain import Contained
from trimtab.sample.probes.forward import BOUNDED_EVERY, KIND_EVERY, ForwardTap


def modal() -> nn.Sequential:
    """A model that behaves differently in training and in evaluation."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 3))


class Tapped:
    """A model with a tap on it, as a guard puts it there."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.renewed = 0
        self.tap = ForwardTap(model, self._renew, Contained())
        model.register_forward_pre_hook(self.tap, with_kwargs=True)
        self.tap.look_at_output(listen=False, spread=True)

    def _renew(self) -> None:
        self.renewed += 1

    def forward(self, num: int = 1) -> None:
        for _ in range(num):
            self.model(torch.randn(8, 4))


def test_forwards_are_told_once() -> None:
    tapped = Tapped(mlp())
    assert tapped.tap.take() == {}
    tapped.forward(3)
    assert tapped.tap.take() == {"autocast": 0.0}
    assert tapped.tap.take() == {}


def test_buffers_are_renewed_at_the_first_training_forward_of_a_step() -> None:
    tapped = Tapped(mlp())
    tapped.forward(3)
    assert tapped.renewed == 1
    tapped.tap.step_done()
    with torch.no_grad():
        tapped.forward()
    tapped.model.eval()
    tapped.forward()
    assert tapped.renewed == 1
    tapped.model.train()
    tapped.forward(2)
    assert tapped.renewed == 2


def test_evaluation_mode_matters_only_where_modules_differ() -> None:
    plain, different = Tapped(mlp()), Tapped(modal())
    for tapped in (plain, different):
        tapped.model.eval()
        tapped.forward()
    assert "eval_forward" not in plain.tap.take()
    assert different.tap.take()["eval_forward"] == 1.0


def test_single_layers_in_evaluation_mode_are_meant() -> None:
    tapped = Tapped(modal())
    tapped.model[1].eval()
    tapped.forward()
    assert "eval_forward" not in tapped.tap.take()
    tapped.model.eval()
    tapped.model[2].train()  # one of them still trains
    tapped.forward()
    assert "eval_forward" not in tapped.tap.take()


@pytest.mark.parametrize("layer", [nn.Dropout(0.0), nn.BatchNorm1d(8, track_running_stats=False), nn.LayerNorm(8)])
def test_layers_that_are_the_same_in_both_modes(layer: nn.Module) -> None:
    tapped = Tapped(nn.Sequential(nn.Linear(4, 8), layer))
    tapped.model.eval()
    tapped.forward()
    assert "eval_forward" not in tapped.tap.take()


def test_a_layer_that_comes_later_is_found_by_refreshing() -> None:
    model = mlp()
    tapped = Tapped(model)
    model.append(nn.Dropout(0.5))
    tapped.tap.refresh()
    model.eval()
    tapped.forward()
    assert tapped.tap.take()["eval_forward"] == 1.0


def test_evaluation_without_gradients_is_no_training() -> None:
    tapped = Tapped(modal())
    tapped.forward()
    tapped.model.eval()
    with torch.no_grad():
        tapped.forward(5)
    tapped.model.train()
    assert tapped.tap.take() == {"autocast": 0.0}


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_training_forward_without_gradients(context: Callable[[], Any]) -> None:
    tapped = Tapped(mlp())
    tapped.forward()
    assert "no_grad_forward" not in tapped.tap.take()
    with context():
        tapped.forward()
    assert tapped.tap.take()["no_grad_forward"] == 1.0
    tapped.forward()
    with context():
        tapped.forward()  # beside a training forward it is a look at something else
    assert "no_grad_forward" not in tapped.tap.take()


def test_a_root_that_is_never_called_is_judged_by_its_parts() -> None:
    tapped = Tapped(modal())
    assert tapped.tap.take() == {}
    tapped.model.eval()
    assert tapped.tap.take() == {"eval_forward": 1.0}


@pytest.mark.parametrize(("dtype", "kind"), [(torch.bfloat16, 2.0), (torch.float16, 1.0), (None, 0.0)])
def test_autocast_kinds(dtype: torch.dtype | None, kind: float) -> None:
    tapped = Tapped(mlp())
    with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        tapped.forward()
    assert tapped.tap.take()["autocast"] == kind


def test_losses_tell_their_kind_and_whether_they_lead_back() -> None:
    tapped = Tapped(mlp())
    x, y = batch()
    tapped.tap.loss(functional.cross_entropy(tapped.model(x), y))
    assert tapped.tap.batch.loss_kind == tapped.tap.output.loss_kind == "nll"
    assert "loss_detached" not in tapped.tap.take()
    tapped.tap.loss(functional.cross_entropy(tapped.model(x), y).detach())
    assert tapped.tap.take()["loss_detached"] == 1.0
    assert tapped.tap.batch.loss_kind == "nll"
    assert "loss_detached" not in tapped.tap.take()


def test_a_bounded_loss_is_told_now_and_then() -> None:
    tapped = Tapped(mlp())
    x, y = batch()
    seen = []
    for _ in range(3 * BOUNDED_EVERY):
        tapped.tap.loss(functional.cross_entropy(tapped.model(x), y))
        seen.append(tapped.tap.take().get("bounded"))
    assert seen == ([1.0] + [None] * (BOUNDED_EVERY - 1)) * 3
    for _ in range(KIND_EVERY):
        tapped.tap.loss((functional.cross_entropy(tapped.model(x), y, reduction="none") * torch.randn(8)).mean())
    assert "bounded" not in tapped.tap.take()


def test_inputs_and_outputs_are_looked_at() -> None:
    tapped = Tapped(mlp())
    tapped.forward()
    assert "in_rms" in tapped.tap.batch.take()
    assert "out_spread" in tapped.tap.output.take()
    tapped.tap.look_at_output(listen=False, spread=True)
    with torch.no_grad():
        tapped.forward(20)
    assert tapped.tap.batch.take() == {}
    assert tapped.tap.output.take() == {}
    tapped.forward()  # still wanted: nobody has looked yet
    assert "out_spread" in tapped.tap.output.take()


def test_the_hook_behind_the_forward_is_there_only_when_wanted() -> None:
    model = mlp()
    tap = ForwardTap(model, lambda: None, Contained())
    for listen, spread in ((True, False), (False, True), (True, True), (False, False), (True, False)):
        for _ in range(2):
            tap.look_at_output(listen=listen, spread=spread)
            assert len(model._forward_hooks) == int(listen or spread)
            assert (tap.output.listen, tap.output.wanted) == (listen, spread)
    tap.remove()
    assert not model._forward_hooks
    tap.remove()


def test_an_output_that_nobody_wants_is_not_looked_at() -> None:
    tapped = Tapped(mlp())
    tapped.tap.look_at_output(listen=False, spread=False)
    tapped.forward()
    assert tapped.tap.output.take() == {}
    tapped.tap.look_at_output(listen=True, spread=False)
    tapped.tap.output.loss_kind = "nll"
    x, y = batch()
    functional.cross_entropy(tapped.model(x), y).backward()
    assert set(tapped.tap.output.take()) == {"loss_factor", "answer_ratio"}


def test_keyword_inputs_are_looked_at() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, *, tokens: Tensor) -> Tensor:
            out: Tensor = self.layer(tokens)
            return out

    tapped = Tapped(Model())
    tapped.model(tokens=torch.full((8, 4), float("nan")))
    assert tapped.tap.batch.take()["in_bad"] == 1.0


# -- copies and the end --------------------------------------------------------------------------------------------


def hooks_of(model: nn.Module) -> list[Any]:
    tables = (model._forward_pre_hooks, model._forward_hooks)
    return [hook for table in tables for _, hook in table.items()]  # `values()` does not list those of a guard


def every_hook(model: nn.Module) -> list[Any]:
    return [*hooks_of(model), *model._load_state_dict_post_hooks.values()]


def copies(model: nn.Module) -> list[nn.Module]:
    return [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]


def test_a_copy_carries_no_hooks() -> None:
    model = modal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 2)
        assert model._forward_hooks
        for other in copies(model):
            assert len(every_hook(model)) == 3
            assert every_hook(other) == []
            other(batch()[0]).sum().backward()
            other.load_state_dict(model.state_dict())
            other.eval()(batch()[0])
        train(model, optimizer, 2)
    assert kept.all("eval_forward") == [None] * 4
    assert kept.all("backwards") == [None] * 4


def test_gradient_hooks_stay_with_the_original() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 3)
        other = copy.deepcopy(model)
        loss_of(other).backward()
        train(model, optimizer, 2)
        loss_of(model).backward()
        train(model, optimizer, 1)
    assert kept.all("backwards") == [None] * 5 + [2.0]


@pytest.mark.parametrize("make", [mlp, modal])
def test_closing_takes_every_hook_off(make: Callable[[], nn.Module]) -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    guard = Guard.attach(model, optimizer, run_dir=False)
    train(model, optimizer, 4)
    assert every_hook(model)
    guard.close()
    for module in model.modules():
        assert every_hook(module) == []
    assert not any(p._backward_hooks for p in model.parameters())
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks
    assert not optimizer._optimizer_load_state_dict_post_hooks
    train(model, optimizer, 2)


def test_the_stand_in_does_nothing() -> None:
    model = mlp()
    tap = ForwardTap(model, lambda: None, Contained())
    left = pickle.loads(pickle.dumps(tap))
    assert left(1, (2,), {"three": 3}) is None
    assert left(1, (2,)) is None
    assert b"trimtab" not in pickle.dumps(tap)  # a model saved whole loads where there is no trimtab
    assert is_inert(pickle.loads(pickle.dumps(tap)))
    tap.look_at_output(listen=True, spread=True)
    (behind,) = every_hook(model)
    assert is_inert(copy.copy(behind))
    assert is_inert(pickle.loads(pickle.dumps(behind)))


def test_eval_mode_in_a_real_loop() -> None:
    model = modal()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (guard, kept):
        train(model, optimizer, 12, after=lambda step: model.eval() if step == 5 else None)
    assert kept.all("eval_forward") == [None] * 6 + [1.0] * 6
    assert [f.name for f in guard.findings] == ["eval-mode"]


class TrunkAndHead(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(drop))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.trunk(x))
        return out


def modes_of(model: nn.Module, *looks: Callable[[], object]) -> dict[str, tuple[str, ...]]:
    tap = ForwardTap(model, lambda: None, Contained())
    notes: dict[str, tuple[str, ...]] = {}
    for change in looks:
        change()
        notes = tap.modes()[1]
    return notes


def test_a_part_in_evaluation_mode_is_seen_where_it_cannot_be_meant() -> None:
    fresh = TrunkAndHead()
    assert modes_of(fresh, fresh.trunk.eval) == {"eval_parts": ("trunk.1",)}  # it has never seen a batch
    assert modes_of(fresh, fresh.eval) == {}  # all of it: another fact
    frozen = TrunkAndHead()
    frozen.trunk.requires_grad_(False)
    assert modes_of(frozen, frozen.trunk.eval) == {}
    used = TrunkAndHead()
    used(torch.randn(8, 4))
    assert modes_of(used, lambda: None, used.trunk.eval) == {}  # statistics that are kept on purpose
    dropping = TrunkAndHead(0.5)
    dropping(torch.randn(8, 4))
    assert modes_of(dropping, lambda: None, dropping.trunk.eval) == {"eval_parts": ("trunk.1", "trunk.2")}
    assert modes_of(dropping, dropping.trunk.eval) == {}  # from the start: it may be meant


def test_layers_that_drop_nearly_everything_are_named_while_they_train() -> None:
    high = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.95), nn.LSTM(8, 8, num_layers=2, dropout=0.9), nn.Dropout(0.5))
    assert modes_of(high, lambda: None) == {"dropout": ("1", "2")}
    assert modes_of(high, high.eval) == {}
    assert modes_of(TrunkAndHead(0.5), lambda: None) == {}
