from __future__ import annotations

import pytest
import torch

from trimtab.core.errors import InputError
from trimtab.core.presets import get_preset, warmup_lr
from trimtab.train.schedules import make_schedule
from trimtab.train.settings import SCHEDULES, TrainConfig, UltraOptimizedConfig


def optimizer(*rates: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


def rates_over(schedule: object, optimizer: torch.optim.Optimizer, num: int) -> list[list[float]]:
    out = []
    for _ in range(num):
        out.append(schedule.rates)
        optimizer.step()
        schedule.step()
    return out


def test_c6_the_warm_up_is_the_documented_formula() -> None:
    one = optimizer(5e-5)
    schedule = make_schedule(one, "none", total_steps=600, warmup_steps=200, warmup_init_lr=1e-6)
    seen = [rates[0] for rates in rates_over(schedule, one, 600)]
    hints = get_preset("mlp-cuda").hints
    assert seen == pytest.approx([warmup_lr(hints, step) for step in range(600)], rel=1e-12)
    assert (seen[0], seen[200], seen[599]) == (1e-6, 5e-5, 5e-5)


@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_schedule_keeps_the_ratio_of_its_groups_and_never_ends_in_an_error(kind: str) -> None:
    one = optimizer(1e-2, 1e-3)
    schedule = make_schedule(one, kind, total_steps=40)
    seen = rates_over(schedule, one, 50)  # longer than planned: a loader may have grown
    assert all(head == pytest.approx(10 * body, rel=1e-6, abs=1e-12) for head, body in seen)
    assert max(head for head, _ in seen) <= 1e-2 * (1 + 1e-9)
    falls = kind not in ("none", "plateau")
    assert (min(head for head, _ in seen) < 0.9e-2) == falls


@pytest.mark.parametrize("kind", [kind for kind in SCHEDULES if kind != "onecycle"])
def test_a_warm_up_comes_before_every_schedule(kind: str) -> None:
    one = optimizer(1e-2)
    schedule = make_schedule(one, kind, total_steps=60, warmup_steps=10)
    seen = [rates[0] for rates in rates_over(schedule, one, 11)]
    assert seen == pytest.approx([1e-3 * step for step in range(11)])


def test_b13_one_cycle_has_a_peak_per_group_after_a_tenth() -> None:
    one = optimizer(1.25e-4, 1.25e-5)
    seen = rates_over(make_schedule(one, "onecycle", total_steps=100), one, 100)
    peak = max(range(100), key=lambda step: seen[step][0])
    assert peak == 9
    assert seen[peak] == pytest.approx([1.25e-4, 1.25e-5])
    assert seen[-1][0] < 1e-6


def test_plateau_goes_by_the_validation_loss() -> None:
    one = optimizer(1e-2)
    schedule = make_schedule(one, "plateau", total_steps=100, gamma=0.5)
    for _ in range(6):
        schedule.epoch_done(1.0)
    assert schedule.rates == [5e-3]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_a_schedule_goes_on_where_its_state_was_taken(kind: str) -> None:
    one, other = optimizer(1e-2), optimizer(1e-2)
    first = make_schedule(one, kind, total_steps=40, warmup_steps=0 if kind == "onecycle" else 10)
    whole = rates_over(first, one, 40)
    second = make_schedule(other, kind, total_steps=40, warmup_steps=0 if kind == "onecycle" else 10)
    begun = rates_over(second, other, 17)
    third_optimizer = optimizer(1e-2)
    third = make_schedule(third_optimizer, kind, total_steps=40, warmup_steps=0 if kind == "onecycle" else 10)
    third_optimizer.load_state_dict(other.state_dict())
    third.load_state_dict(second.state_dict())
    assert begun + rates_over(third, third_optimizer, 23) == whole


@pytest.mark.parametrize(("then", "now"), [({"min_lr_ratio": 0.5}, {}), ({}, {"min_lr_ratio": 0.5})])
def test_another_plan_holds_from_the_same_step_on(then: dict[str, float], now: dict[str, float]) -> None:
    first, second, third = optimizer(0.1), optimizer(0.1), optimizer(0.1)
    old = make_schedule(first, "cosine", total_steps=20, **then)
    rates_over(old, first, 15)
    wanted = make_schedule(second, "cosine", total_steps=20, **now)
    rates_over(wanted, second, 15)
    resumed = make_schedule(third, "cosine", total_steps=20, **now)
    resumed.load_state_dict(old.state_dict())
    third.param_groups[0]["lr"] = old.rates[0]  # as it comes with the optimizer of the checkpoint
    resumed.follow_plan()
    assert resumed.rates == pytest.approx(wanted.rates)
    assert resumed.rates != pytest.approx(old.rates)


def test_a_warm_up_takes_at_most_half_of_a_run_and_an_unknown_kind_is_told() -> None:
    one = optimizer(1.0)
    schedule = make_schedule(one, "none", total_steps=20, warmup_steps=1000)
    assert rates_over(schedule, one, 11)[10] == [1.0]
    with pytest.raises(InputError, match="scheduler_type is 'cosinus'; expected one of none, onecycle"):
        make_schedule(one, "cosinus", total_steps=1)


def test_d1_the_documented_configuration() -> None:
    config = UltraOptimizedConfig()
    assert isinstance(config, TrainConfig)
    documented = {
        "max_grad_norm": 1.0,
        "use_amp": True,
        "learning_rate": 1e-3,
        "weight_decay": 1e-4,
        "patience": 10,
        "batch_size": 32768,
        "num_epochs": 100,
        "min_delta": 1e-4,
        "scheduler_type": "cosine",
        "warmup_steps": 1000,
        "max_steps": 100_000,
    }
    assert {name: getattr(config, name) for name in documented} == documented
    assert UltraOptimizedConfig(patience=3).patience == 3
