"""Each remedy on live objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.guard.conftest import batches, mse, small_model
from trimtab import Guard
from trimtab.core.policy import LADDERS
from trimtab.core.types import Action, Outcome
from trimtab.remedies import BUILTIN
from trimtab.remedies.raise_weight_decay import ORIGINAL


def lane(optimizer: Any, scaler: Any = None) -> Any:
    target = SimpleNamespace(
        optimizer=optimizer, scaler=scaler, last_rejected=True, stop_requested=False, rewound_at=-1, batches=None
    )
    target.request_stop = lambda: setattr(target, "stop_requested", True)
    return target


def apply(target: Any, kind: str, **args: float) -> Outcome:
    outcome = BUILTIN[kind].apply(Action(kind=kind, args=args), target, 7)
    assert (outcome.at, outcome.action.kind) == (7, kind)
    return outcome


def test_every_action_of_the_policy_has_its_remedy() -> None:
    wanted = {a.kind for rungs in LADDERS.values() for _, actions in rungs for a in actions}
    assert wanted <= set(BUILTIN)
    assert set(BUILTIN) == {"skip", "skip_data", "stop", "cut_lr", "raise_weight_decay", "back_off_scaler", "rewind"}


def test_skip_and_stop() -> None:
    target = lane(None)
    assert apply(target, "skip").applied
    target.last_rejected = False
    assert not apply(target, "skip").applied
    assert apply(target, "stop").applied
    assert target.stop_requested


def test_cut_lr_is_a_multiplier_in_the_step_only() -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Guard(model, optimizer, run_dir=False) as guard:
        outcome = apply(guard._lanes[""], "cut_lr", factor=0.1)
        assert outcome.applied
        assert outcome.detail == "LR multiplier 1 -> 0.1, effective LR 0.01"
        before = model[3].bias.detach().clone()
        mse(model, batches(1)[0]).backward()
        optimizer.step()
        assert torch.allclose(before - model[3].bias, 0.01 * model[3].bias.grad)
        assert optimizer.param_groups[0]["lr"] == 0.1
        for _ in range(5):
            last = apply(guard._lanes[""], "cut_lr", factor=0.1)
        assert not last.applied  # at the floor


class TestRaiseWeightDecay:
    def groups(self, *decays: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], "weight_decay": d} for d in decays])

    def test_groups_with_decay_get_more_of_it(self) -> None:
        optimizer = self.groups(0.01, 0.0, 0.02)
        outcome = apply(lane(optimizer), "raise_weight_decay", factor=1.5)
        assert outcome.applied
        assert outcome.detail == "weight decay 0.01 -> 0.015, 0.02 -> 0.03"
        assert [g["weight_decay"] for g in optimizer.param_groups] == pytest.approx([0.015, 0.0, 0.03])

    def test_where_there_is_none_at_all_it_starts_small(self) -> None:
        optimizer = self.groups(0.0, 0.0)
        target = lane(optimizer)
        assert apply(target, "raise_weight_decay").applied
        assert [g["weight_decay"] for g in optimizer.param_groups] == [1e-4, 1e-4]
        for _ in range(20):
            last = apply(target, "raise_weight_decay")
        assert [g["weight_decay"] for g in optimizer.param_groups] == pytest.approx([1e-3, 1e-3])
        assert (last.applied, last.detail) == (False, "weight decay is as high as it may be")

    def test_bounds(self) -> None:
        optimizer = self.groups(1e-3, 0.05, 0.3)
        for _ in range(20):
            apply(lane(optimizer), "raise_weight_decay")
        # ten times the first one; the highest of all; one that began above it is not lowered
        assert [g["weight_decay"] for g in optimizer.param_groups] == pytest.approx([0.01, 0.1, 0.3])
        optimizer = self.groups(0.05)
        apply(lane(optimizer), "raise_weight_decay", max=0.06)
        assert optimizer.param_groups[0]["weight_decay"] == 0.06

    def test_schedulers_leave_it_and_the_bound_survives_a_checkpoint(self) -> None:
        optimizer = self.groups(0.001)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
        apply(lane(optimizer), "raise_weight_decay")
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.0015)
        twin = self.groups(0.001)
        twin.load_state_dict(optimizer.state_dict())
        assert twin.param_groups[0][ORIGINAL] == 0.001
        for _ in range(20):
            apply(lane(twin), "raise_weight_decay")
        assert twin.param_groups[0]["weight_decay"] == pytest.approx(0.01)

    def test_an_optimizer_without_decay_is_left_alone(self) -> None:
        optimizer = torch.optim.Rprop([nn.Parameter(torch.ones(2))])
        outcome = apply(lane(optimizer), "raise_weight_decay")
        assert (outcome.applied, outcome.detail) == (False, "Rprop has no weight decay to raise")

    def test_it_acts_on_the_weights(self) -> None:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0, weight_decay=0.01)
        apply(lane(optimizer), "raise_weight_decay")
        (weight,) = optimizer.param_groups[0]["params"]
        weight.grad = torch.zeros(2)
        optimizer.step()
        assert weight.tolist() == pytest.approx([0.985, 0.985])


class TestBackOffScaler:
    def scaler(self, scale: float = 1024.0, **options: Any) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", init_scale=scale, **options)

    def one_step(self, scaler: Any, model: nn.Module, optimizer: Any, apply_it: bool) -> Outcome | None:
        """A remedy is applied where the guard does it: inside `scaler.step`."""
        outcome: list[Outcome] = []
        hook = optimizer.register_step_post_hook(
            lambda *_: outcome.append(apply(lane(optimizer, scaler), "back_off_scaler")) if apply_it else None
        )
        scaler.scale(mse(model, batches(1)[0])).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        hook.remove()
        return outcome[0] if outcome else None

    def test_the_scale_is_halved_at_the_end_of_the_iteration(self) -> None:
        model, scaler = small_model(), self.scaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.one_step(scaler, model, optimizer, apply_it=False)
        outcome = self.one_step(scaler, model, optimizer, apply_it=True)
        assert outcome is not None
        assert outcome.applied
        assert outcome.detail == "loss scale 1024 -> 512"
        assert scaler.get_scale() == 512.0
        assert "update" not in vars(scaler)
        self.one_step(scaler, model, optimizer, apply_it=False)
        assert scaler.get_scale() == 512.0

    def test_two_optimizers_with_one_scaler_stay_in_step(self) -> None:
        results = []
        for apply_it in (False, True):
            models, scaler = [small_model(), small_model()], self.scaler()
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in models]
            for model in models:
                scaler.scale(mse(model, batches(1)[0])).backward()
            for optimizer in optimizers:
                scaler.step(optimizer)
                if apply_it:
                    apply(lane(optimizer, scaler), "back_off_scaler")
            scaler.update()
            results.append([p for m in models for p in m.parameters()])
            assert scaler.get_scale() == (512.0 if apply_it else 1024.0)
            assert "update" not in vars(scaler)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_what_the_scaler_backed_off_by_itself_is_not_halved_again(self) -> None:
        model, scaler = small_model(), self.scaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler.scale(mse(model, batches(1, bad=(0,))[0])).backward()
        apply(lane(optimizer, scaler), "back_off_scaler")
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 512.0

    def test_it_is_never_below_one(self) -> None:
        for scale, applied, after in ((1.5, True, 1.0), (1.0, False, 1.0), (0.25, False, 0.25)):
            model, scaler = small_model(), self.scaler(scale)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            outcome = self.one_step(scaler, model, optimizer, apply_it=True)
            assert outcome is not None
            assert outcome.applied is applied
            assert scaler.get_scale() == after

    def test_without_a_scaler_there_is_nothing_to_do(self) -> None:
        optimizer = torch.optim.SGD(small_model().parameters(), lr=0.01)
        for scaler in (None, self.scaler(enabled=False)):
            assert apply(lane(optimizer, scaler), "back_off_scaler").detail == "there is no loss scaler at work"

    def test_somebody_elses_wrapper_stays_and_it_happens_once(self) -> None:
        model, scaler = small_model(), self.scaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.one_step(scaler, model, optimizer, apply_it=False)
        apply(lane(optimizer, scaler), "back_off_scaler")
        mine = scaler.update
        calls = []

        def wrapped(*args: Any) -> None:
            calls.append(1)
            mine(*args)

        scaler.update = wrapped  # type: ignore[method-assign]
        self.one_step(scaler, model, optimizer, apply_it=False)
        assert scaler.get_scale() == 512.0
        scaler._scale.fill_(2048.0)  # type: ignore[union-attr]
        self.one_step(scaler, model, optimizer, apply_it=False)
        assert scaler.get_scale() == 2048.0
        assert len(calls) == 2

    def test_the_guard_gives_every_lane_the_scaler(self) -> None:
        model, scaler = small_model(), self.scaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with Guard(model, optimizer, scaler=scaler, run_dir=False) as guard:
            assert guard._lanes[""].scaler is scaler
        with Guard(model, optimizer, run_dir=False) as guard:
            assert guard._lanes[""].scaler is None
