"""The documented checks and corrections of a trainer: clipping, NaN and Inf, unstable losses, health, numbers."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from trimtab import Guard
from trimtab.compat.monitors.stability import (
    HEALTH_KEYS,
    LossHistory,
    StabilityCorrector,
    StabilityMonitor,
    check_nan_inf,
    check_training_stability,
    clip_gradients,
    corrector_of,
    find_nonfinite,
    get_training_stats,
    handle_nan_inf,
    handle_training_instability,
    monitor_training_health,
)
from trimtab.core.config import PolicyConfig
from trimtab.core.errors import AttachError, InputError

NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "trimtab"):
        yield caplog


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def with_gradients(scale: float = 1.0) -> nn.Sequential:
    model = net()
    (model(torch.randn(8, 3)).square().mean() * scale).backward()
    return model


def norm_of(model: nn.Module) -> float:
    return float(torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm())


def one(lr: float = 0.1, **more: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=lr, **more)


# --- D2 clipping


def test_gradient_clipping(warned: pytest.LogCaptureFixture) -> None:
    model = with_gradients(scale=100.0)
    before = norm_of(model)
    result = clip_gradients(model, max_norm=0.5)
    assert result.before == pytest.approx(before)
    assert result.after == pytest.approx(0.5, abs=1e-5)
    assert norm_of(model) == pytest.approx(result.after, rel=1e-5)
    assert warned.messages == [
        f"Gradient norm before clipping: {result.before:.6f}",
        f"Gradient norm after clipping: {result.after:.6f}",
    ]


def test_d2_what_is_small_enough_is_left_bit_for_bit() -> None:
    model = with_gradients()
    kept = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    result = clip_gradients(model, max_norm=1e6)
    assert result.before == result.after
    assert all(torch.equal(k, p.grad) for k, p in zip(kept, model.parameters(), strict=True) if p.grad is not None)


def test_d2_without_a_limit_it_is_the_documented_one() -> None:
    model = with_gradients(scale=1000.0)
    assert clip_gradients(model).after == pytest.approx(1.0, abs=1e-5)


def test_d2_nonfinite_gradients_are_named_and_left_alone(warned: pytest.LogCaptureFixture) -> None:
    model = with_gradients()
    model[0].weight.grad[0, 0] = NAN
    model[2].bias.grad[0] = INF
    kept = model[2].weight.grad.clone()
    result = clip_gradients(model, max_norm=1e-3)
    assert result.skip
    assert result.nonfinite == ("0.weight", "2.bias")
    assert torch.equal(model[2].weight.grad, kept)
    assert "NaN detected in gradient of 0.weight" in warned.messages
    assert "Inf detected in gradient of 2.bias" in warned.messages


def test_d2_finite_gradients_of_1e20_are_clipped_not_zeroed() -> None:
    model = with_gradients(scale=1e20)
    result = clip_gradients(model, max_norm=1.0)
    assert not result.skip
    assert norm_of(model) == pytest.approx(1.0, rel=1e-4)


def scaled_step(clip: Callable[[nn.Module, Any, Any], object], bad: bool = False) -> tuple[float, float]:
    """One fp16-style step at scale 65536: how far the weight moved, and the scale after it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale(model(torch.ones(1, 1)).sum() * 0.5).backward()
    if bad:
        model.weight.grad.fill_(INF)
    clip(model, optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()
    return float(model.weight.detach()), scaler.get_scale()


def test_d2_under_a_scaler_true_gradients_are_clipped() -> None:
    moved, _ = scaled_step(lambda m, o, s: clip_gradients(m, 1.0, optimizer=o, scaler=s))
    assert moved == pytest.approx(-0.5)
    control, _ = scaled_step(lambda m, o, s: nn.utils.clip_grad_norm_(m.parameters(), 1.0))
    assert abs(control) < 2e-5  # what clipping scaled gradients does to a step


def test_d2_an_overflow_stays_visible_to_the_scaler() -> None:
    moved, scale = scaled_step(lambda m, o, s: clip_gradients(m, 1.0, optimizer=o, scaler=s), bad=True)
    assert (moved, scale) == (0.0, 32768.0)

    def hide(model: nn.Module, optimizer: Any, scaler: Any) -> None:
        for p in model.parameters():
            p.grad = handle_nan_inf(p.grad)

    assert scaled_step(hide, bad=True)[1] == 65536.0  # the control: replaced by 0, the overflow is never seen


def test_d2_a_scaler_without_its_optimizer_is_refused() -> None:
    with pytest.raises(InputError, match="needs optimizer="):
        clip_gradients(with_gradients(), scaler=torch.amp.GradScaler("cpu"))


# --- D3, D4, D5 NaN and Inf


def test_nan_inf_handling(warned: pytest.LogCaptureFixture) -> None:
    bad = torch.tensor([1.0, NAN, INF, -INF])
    assert check_nan_inf(bad, "logits")
    assert warned.messages == ["NaN detected in logits", "Inf detected in logits"]
    fixed = handle_nan_inf(bad, replacement_value=7.0)
    assert fixed.tolist() == [1.0, 7.0, 7.0, 7.0]
    assert math.isnan(bad[1])  # the one given is left alone
    assert not check_nan_inf(fixed, "fixed")


@pytest.mark.parametrize(
    "value", [0.5, torch.ones(3), torch.tensor([1, 2]), torch.tensor([3e38, 3e38]), torch.zeros(0)]
)
def test_d3_what_is_finite_is_silent(value: Any, warned: pytest.LogCaptureFixture) -> None:
    assert not check_nan_inf(value, "x")
    assert warned.messages == []


@pytest.mark.parametrize(
    "value",
    [NAN, INF, torch.tensor(NAN), torch.tensor([INF], dtype=torch.float16), torch.tensor([complex(0, NAN)])],
)
def test_d3_every_kind_of_value_is_looked_at(value: Any) -> None:
    assert check_nan_inf(value, "x")


def test_d3_many_tensors_are_looked_at_together() -> None:
    named = [("a", torch.ones(2)), ("b", torch.tensor([NAN, NAN])), ("c", torch.arange(3)), ("d", torch.tensor([INF]))]
    assert find_nonfinite(named) == {"b": (2, 0), "d": (0, 1)}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_d4_type_and_count(dtype: torch.dtype, warned: pytest.LogCaptureFixture) -> None:
    fixed = handle_nan_inf(torch.tensor([NAN, 2.0, INF], dtype=dtype))
    assert fixed.dtype is dtype
    assert fixed.tolist() == [0.0, 2.0, 0.0]
    assert warned.messages == ["replaced 2 of 3 values that were NaN or Inf by 0"]


def test_d4_is_differentiable() -> None:
    x = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    (handle_nan_inf(x) * torch.tensor([2.0, 5.0, 3.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 0.0, 3.0]


def test_d4_a_replacement_that_is_no_help_is_refused() -> None:
    with pytest.raises(InputError, match="finite number"):
        handle_nan_inf(torch.ones(1), NAN)
    with pytest.raises(InputError, match="float16 can hold"):
        handle_nan_inf(torch.ones(1, dtype=torch.float16), 1e10)
    with pytest.raises(InputError, match="dense"):
        handle_nan_inf(torch.ones(2).to_sparse())
    whole = torch.tensor([1, 2])
    assert handle_nan_inf(whole).tolist() == [1, 2]


def test_d5_parameters_buffers_loss_and_outputs(warned: pytest.LogCaptureFixture) -> None:
    model = net()
    with StabilityMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        assert monitor.check_parameters() == ()
        with torch.no_grad():
            model[0].bias[1] = NAN
            model[1].running_var[0] = INF
        assert monitor.check_parameters() == ("parameter 0.bias", "buffer 1.running_var")
        assert monitor.check_nan_inf(NAN, "loss")
        assert monitor.check_nan_inf(torch.tensor([INF]), "validation output")
    assert warned.messages[-2:] == ["NaN detected in loss", "Inf detected in validation output"]


# --- D6 unstable losses


def judged(*epochs: tuple[float, float | None], **settings: Any) -> list[list[str]]:
    history = LossHistory()
    return [check_training_stability(train, val, history, **settings) for train, val in epochs]


def test_training_stability_monitoring() -> None:
    assert check_training_stability(NAN, 1.0) == ["train_loss_nan_inf"]
    assert check_training_stability(1.0, INF) == ["val_loss_nan_inf"]
    assert judged((1.0, 1.0), (10.5, 1.0))[-1] == ["loss_explosion"]
    assert judged((1.0, 1.0), (0.9, 1.1))[-1] == ["overfitting"]
    assert judged((1.0, 1.0), (0.9, 0.95), (0.8, 0.9)) == [[], [], []]
    assert judged((1.0, 1.0), (9.9, 1.1)) == [[], []]  # less than tenfold, and training got worse as well


def test_d6_nan_never_enters_the_history() -> None:
    history = LossHistory()
    for loss in (1.0, NAN, INF):
        check_training_stability(loss, NAN, history)
    assert (history.train, history.val) == ([1.0], [])
    assert check_training_stability(50.0, 1.0, history) == ["loss_explosion"]  # compared with 1.0, not with NaN


def test_d6_a_tensor_will_do() -> None:
    assert check_training_stability(torch.tensor(NAN), torch.tensor(1.0)) == ["train_loss_nan_inf"]


@pytest.mark.parametrize("losses", [(-5.0, -4.0), (-1.0, 3.0), (1e-9, 1e-7), (0.0, 1e-7), (2.0, 1e-7, 1e-4)])
def test_d6_negative_losses_and_those_near_zero_do_not_explode(losses: tuple[float, ...]) -> None:
    assert judged(*((loss, None) for loss in losses))[-1] == []


@pytest.mark.parametrize("losses", [(-5.0, 100.0), (0.0, 1.0), (1e-4, 1.0), (1e6, 1.0, 0.9, 0.8, 300.0)])
def test_d6_real_explosions_are_seen_at_any_size(losses: tuple[float, ...]) -> None:
    assert judged(*((loss, None) for loss in losses))[-1] == ["loss_explosion"]


def test_d6_overfitting_can_be_asked_to_last() -> None:
    epochs = [(1.0, 1.0), (0.9, 1.1), (0.8, 1.05), (0.7, 1.1), (0.6, 1.2), (0.5, 1.3)]
    assert [bool(found) for found in judged(*epochs, persistence=3)] == [False, False, False, False, False, True]
    assert judged(*epochs, min_rise=0.2) == [[]] * 6


def test_d6_memory_is_bounded_and_goes_on_after_a_restart() -> None:
    history = LossHistory(window=3)
    for i in range(10):
        history.push(float(i), 1.0)
    assert history.train == [7.0, 8.0, 9.0]
    copy = LossHistory(window=3)
    copy.load_state_dict(history.state_dict())
    assert copy.epochs == history.epochs
    with pytest.raises(InputError, match="at least 2"):
        LossHistory(window=1)


@pytest.mark.parametrize("settings", [{"explosion_factor": 1.0}, {"persistence": 0}])
def test_d6_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected above 1"):
        check_training_stability(1.0, 1.0, **settings)


# --- D7 corrections


@pytest.mark.parametrize(
    ("issue", "factor"), [("train_loss_nan_inf", 0.5), ("val_loss_nan_inf", 0.5), ("loss_explosion", 0.1)]
)
def test_d7_the_documented_cuts(issue: str, factor: float) -> None:
    optimizer = one(lr=0.1)
    outcome = handle_training_instability(issue, optimizer)
    assert outcome.applied
    assert corrector_of(optimizer).rates == pytest.approx([0.1 * factor])
    assert optimizer.param_groups[0]["lr"] == 0.1  # the scheduler's own number
    corrector_of(optimizer).remove()


def test_d7_overfitting_raises_the_decay_even_from_zero_and_to_a_bound() -> None:
    optimizer = one(weight_decay=0.02)
    corrector = StabilityCorrector(optimizer, policy=PolicyConfig(cooldown=0))
    assert corrector.handle("overfitting").applied
    assert corrector.decays == pytest.approx([0.03])
    for _ in range(15):
        corrector.handle("overfitting")
    assert corrector.decays == [0.1]
    assert not corrector.handle("overfitting").applied
    corrector.remove()
    assert optimizer.param_groups[0]["weight_decay"] == 0.1
    without = one(weight_decay=0.0)
    handle_training_instability("overfitting", without)
    assert without.param_groups[0]["weight_decay"] > 0.0


def step_rates(optimizer: torch.optim.Optimizer, scheduler: Any, num: int) -> list[float]:
    """The rates really used: how far the weight moves under a gradient of 1."""
    weight = optimizer.param_groups[0]["params"][0]
    out = []
    for _ in range(num):
        weight.grad = torch.ones_like(weight)
        before = float(weight.detach())
        optimizer.step()
        scheduler.step()
        out.append(before - float(weight.detach()))
    return out


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=40),
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=3),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_d7_the_cut_outlives_every_scheduler(kind: str) -> None:
    plain, cut = one(), one()
    scheduler, other = SCHEDULERS[kind](plain), SCHEDULERS[kind](cut)
    rates = step_rates(plain, scheduler, 12)
    step_rates(cut, other, 4)
    handle_training_instability("loss_explosion", cut)
    after = step_rates(cut, other, 8)
    assert after == pytest.approx([0.1 * r for r in rates[4:]], rel=1e-3, abs=1e-6)
    corrector_of(cut).remove()
    assert cut.param_groups[0]["lr"] == pytest.approx(plain.param_groups[0]["lr"])


@pytest.mark.parametrize("kind", ["onecycle", "lambda"])
def test_d7_control_a_raw_edit_is_undone(kind: str) -> None:
    plain, cut = one(), one()
    scheduler, other = SCHEDULERS[kind](plain), SCHEDULERS[kind](cut)
    rates = step_rates(plain, scheduler, 12)
    step_rates(cut, other, 4)
    cut.param_groups[0]["lr"] *= 0.1
    after = step_rates(cut, other, 8)
    assert after[1:] == pytest.approx(rates[5:], rel=1e-3, abs=1e-6)


def test_d7_a_scheduler_made_after_the_cut_starts_from_the_true_rate() -> None:
    optimizer = one()
    handle_training_instability("train_loss_nan_inf", optimizer)
    scheduler = SCHEDULERS["lambda"](optimizer)
    assert step_rates(optimizer, scheduler, 3) == pytest.approx([0.05] * 3, rel=1e-3)
    corrector_of(optimizer).remove()
    assert step_rates(optimizer, scheduler, 2) == pytest.approx([0.1] * 2, rel=1e-3)


def test_d7_cool_down_budget_and_floor() -> None:
    optimizer = one()
    scheduler = SCHEDULERS["lambda"](optimizer)
    with StabilityCorrector(optimizer, policy=PolicyConfig(cooldown=3, budget=3, floor=0.02)) as corrector:
        assert corrector.handle("loss_explosion").applied
        assert "at least 3 must pass" in corrector.handle("loss_explosion").detail
        assert corrector.handle("overfitting").applied  # a cool-down is for one kind
        step_rates(optimizer, scheduler, 3)
        assert corrector.handle("loss_explosion").applied
        assert corrector.rates == pytest.approx([0.002])  # the floor, not 0.001
        step_rates(optimizer, scheduler, 3)
        assert "budget" in corrector.handle("loss_explosion").detail


def test_d7_factors_can_be_set() -> None:
    optimizer = one()
    with StabilityCorrector(optimizer, factors={"loss_explosion": 0.25}) as corrector:
        corrector.handle("loss_explosion")
        assert corrector.rates == pytest.approx([0.025])
    other = one()
    handle_training_instability("loss_explosion", other, factor=0.3)
    assert corrector_of(other).rates == pytest.approx([0.03])
    for issue, factor in (("loss_explosion", 1.5), ("overfitting", 0.5), ("train_loss_nan_inf", 0.0)):
        with pytest.raises(InputError, match="the factor for"):
            handle_training_instability(issue, one(), factor=factor)
    with pytest.raises(InputError, match="not a known issue"):
        handle_training_instability("boredom", one())
    with pytest.raises(InputError, match="not a known issue"):
        StabilityCorrector(one(), factors={"boredom": 0.5})


def test_d7_it_recovers_only_when_asked() -> None:
    policy = PolicyConfig(cooldown=2, recover=2)
    stays, grows = one(), one()
    corrector, other = StabilityCorrector(stays, policy=policy), StabilityCorrector(grows, policy=policy, recover=True)
    for k in (corrector, other):
        k.handle("train_loss_nan_inf")
    step_rates(stays, SCHEDULERS["lambda"](stays), 10)
    step_rates(grows, SCHEDULERS["lambda"](grows), 10)
    assert (corrector.rates, other.rates) == ([0.05], [0.1])


def test_d7_a_step_that_raises_leaves_the_rate_as_it_was() -> None:
    optimizer = one()
    with StabilityCorrector(optimizer) as corrector:
        corrector.handle("loss_explosion")

        def boom() -> float:
            raise RuntimeError("boom")

        with pytest.raises(RuntimeError, match="boom"):
            optimizer.step(boom)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_d7_remove_leaves_no_trace_and_one_corrector_is_enough() -> None:
    optimizer = one()
    corrector = StabilityCorrector(optimizer)
    assert corrector_of(optimizer) is corrector
    with pytest.raises(AttachError, match="already has"):
        StabilityCorrector(optimizer)
    corrector.handle("loss_explosion")
    corrector.remove()
    corrector.remove()
    assert "step" not in optimizer.__dict__
    assert "removed" in corrector.handle("loss_explosion").detail
    assert step_rates(optimizer, SCHEDULERS["lambda"](optimizer), 1) == pytest.approx([0.1])
    StabilityCorrector(optimizer).remove()


def test_d7_nothing_outlives_the_optimizer() -> None:
    optimizer = one()
    handle_training_instability("loss_explosion", optimizer)
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("guard_first", [True, False])
def test_d7_beside_a_guard_that_cuts_too_the_scheduler_keeps_its_rates(guard_first: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    corrector = None if guard_first else StabilityCorrector(optimizer)
    with Guard(model, optimizer, mode="act", run_dir=False) as guard:
        corrector = corrector or StabilityCorrector(optimizer)
        corrector.handle("train_loss_nan_inf")
        for step in range(6):
            loss = model(torch.randn(4, 2)).square().mean() * (NAN if step == 2 else 1.0)
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["lr"] == 0.1
        assert guard._lanes[""].multiplier.value < 1.0, "the guard cut nothing: the test says nothing"
    corrector.remove()


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_d7_under_a_scaler_with_everything_else_around_step(fused: bool, scheduled: bool) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scheduler = SCHEDULERS["lambda"](optimizer) if scheduled else None
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with (
        Guard(model, optimizer, mode="act", scaler=scaler, run_dir=False) as guard,
        StabilityMonitor(model, optimizer, scaler=scaler) as monitor,
    ):
        guard._lanes[""].multiplier.cut(0.5)
        monitor.handle_training_instability("train_loss_nan_inf")
        before = model.weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).mean()).backward()
            monitor.clip_gradients()
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            assert optimizer.param_groups[0]["lr"] == 0.1
        moved = float((model.weight.detach() - before).abs().max())
    assert moved == pytest.approx(3 * 0.025, rel=0.05)  # Adam moves by about the rate: both cuts were in force


def test_d7_it_goes_on_after_a_restart() -> None:
    first, second = one(), one()
    corrector, other = StabilityCorrector(first), StabilityCorrector(second)
    corrector.handle("loss_explosion")
    other.load_state_dict(corrector.state_dict())
    assert step_rates(second, SCHEDULERS["lambda"](second), 1) == pytest.approx([0.01], rel=1e-3)
    assert not other.handle("loss_explosion").applied


# --- D9 health, D10 numbers


def flip_gradient(model: nn.Module) -> None:
    model[2].weight.grad[0, 0] = NAN  # type: ignore[index]


def flip_parameter(model: nn.Module) -> None:
    with torch.no_grad():
        model[2].weight[0, 0] = INF  # type: ignore[index]


def flip_buffer(model: nn.Module) -> None:
    model[1].running_mean[0] = NAN  # type: ignore[index]


TROUBLES: dict[str, tuple[str, Callable[[nn.Module], object], list[float]]] = {
    "a NaN gradient": ("gradients_healthy", flip_gradient, [0.5]),
    "a NaN loss": ("losses_healthy", lambda m: None, [0.5, NAN, 0.4]),
    "an Inf weight": ("parameters_healthy", flip_parameter, [0.5]),
    "a NaN buffer": ("model_healthy", flip_buffer, [0.5]),
    "evaluation mode": ("model_healthy", lambda m: m.eval(), [0.5]),
    "a new head": ("model_healthy", lambda m: setattr(m, "2", nn.Linear(4, 1)), [0.5]),
}


@pytest.mark.parametrize("trouble", TROUBLES)
def test_d9_each_key_flips_for_its_own_trouble_alone(trouble: str) -> None:
    key, inflict, losses = TROUBLES[trouble]
    model = with_gradients()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    healthy = monitor_training_health(model, losses=[0.5], optimizer=optimizer)
    assert healthy == dict.fromkeys(HEALTH_KEYS, True)
    inflict(model)
    report = monitor_training_health(model, losses=losses, optimizer=optimizer)
    assert {k for k, fine in report.items() if not fine} == {key, "overall_healthy"}


def test_d9_what_is_no_trouble_is_none() -> None:
    model = net().eval()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = {"train": [NAN, *[1.0] * 100], "val": [1.0]}
    assert all(monitor_training_health(model, losses, optimizer, training=None).values())


def test_d9_the_keys_are_those_of_the_guard() -> None:
    model = net()
    with Guard(model, torch.optim.SGD(model.parameters(), lr=0.1), run_dir=False) as guard:
        assert set(HEALTH_KEYS) <= set(guard.health())
    assert set(monitor_training_health(model)) == set(HEALTH_KEYS)


def test_d10_training_stats() -> None:
    model = with_gradients()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu")
    stats = get_training_stats(model, optimizer, training_history=[1.0], validation_history=[2.0], scaler=scaler)
    assert stats == {
        "training_history": [1.0],
        "validation_history": [2.0],
        "current_learning_rate": 0.1,
        "current_weight_decay": 0.01,
        "total_parameters": 29,
        "trainable_parameters": 13,
        "device": "cpu",
        "amp_enabled": True,
        "current_gradient_norm": pytest.approx(norm_of(model)),
    }
    bare = get_training_stats(nn.Identity())
    assert (bare["current_learning_rate"], bare["amp_enabled"], bare["current_gradient_norm"]) == (None, False, 0.0)


# --- the monitor a trainer holds


class Writer:
    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars.append((tag, value, step))


def test_the_documented_spellings_and_tags() -> None:
    model, writer = with_gradients(scale=100.0), Writer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    with StabilityMonitor(model, optimizer, max_grad_norm=0.5, logger=writer) as monitor:
        result = monitor._clip_gradients()
        assert result.after == pytest.approx(0.5, abs=1e-5)
        assert monitor._clip_gradients(max_norm=0.25).after == pytest.approx(0.25, abs=1e-5)
        assert monitor._check_nan_inf(NAN, "loss")
        assert monitor._handle_nan_inf(torch.tensor([NAN])).tolist() == [0.0]
        assert monitor._check_training_stability(1.0, 1.0) == []
        assert monitor._check_training_stability(20.0, 1.0) == ["loss_explosion"]
        assert monitor.get_training_stats()["current_learning_rate"] == pytest.approx(0.01)
        assert monitor.get_training_stats()["training_history"] == [1.0, 20.0]
        assert monitor._handle_training_instability("overfitting").applied
    assert writer.scalars[:2] == [
        ("Training/GradNorm_Before", pytest.approx(result.before), 0),
        ("Training/GradNorm_After", pytest.approx(0.5, abs=1e-5), 0),
    ]
    assert writer.scalars[4:] == [
        ("Training/CorrectiveAction", 1.0, 2),
        ("Training/AdjustedLR", pytest.approx(0.01), 2),
        ("Training/CorrectiveAction", 1.0, 2),
        ("Training/AdjustedWD", pytest.approx(0.015), 2),
    ]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_a_nan_epoch_cuts_once_and_is_unhealthy_but_poisons_nothing() -> None:
    model = net()
    with StabilityMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        assert monitor.check_training_stability(NAN, NAN) == ["train_loss_nan_inf", "val_loss_nan_inf"]
        assert monitor.corrector.rates == pytest.approx([0.05])  # one cut: the cool-down holds the second back
        report = monitor.monitor_training_health()
        assert [k for k, fine in report.items() if not fine] == ["losses_healthy", "overall_healthy"]
        for loss in (1.0, 0.9, 0.8):
            assert monitor.check_training_stability(loss, loss) == []


def test_an_explosion_is_answered_before_a_nan_validation() -> None:
    model = net()
    with StabilityMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as monitor:
        monitor.check_training_stability(1.0, 1.0)
        assert monitor.check_training_stability(50.0, NAN) == ["val_loss_nan_inf", "loss_explosion"]
        assert monitor.corrector.rates == pytest.approx([0.01])


def test_one_noisy_epoch_does_not_change_the_decay() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.01)
    with StabilityMonitor(model, optimizer) as monitor:
        found = [monitor.check_training_stability(1.0 - 0.1 * i, 1.0 + 0.1 * i) for i in range(4)]
    assert found == [[], [], [], ["overfitting"]]
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.015)


def test_a_logger_that_breaks_does_not_break_the_run() -> None:
    def broken(values: dict[str, float]) -> None:
        raise OSError("disk full")

    model = with_gradients()
    with StabilityMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1), logger=broken) as monitor:
        assert not monitor.clip_gradients().skip


def test_the_monitor_goes_on_after_a_restart() -> None:
    model, again = net(), net()
    with (
        StabilityMonitor(model, torch.optim.SGD(model.parameters(), lr=0.1)) as first,
        StabilityMonitor(again, torch.optim.SGD(again.parameters(), lr=0.1)) as second,
    ):
        for loss in (1.0, 30.0):
            first.check_training_stability(loss, 1.0)
        second.load_state_dict(first.state_dict())
        assert second.history.train == [1.0, 30.0]
        assert second.corrector.rates == first.corrector.rates == pytest.approx([0.01])


def test_a_run_that_would_die_is_brought_back() -> None:
    """Least squares at twice the stable rate: unprotected it overflows, corrected epoch by epoch it converges."""

    def train(protected: bool) -> float:
        torch.manual_seed(1)
        x = torch.randn(64, 4)
        y = x @ torch.tensor([1.0, -2.0, 3.0, 0.5])
        model = nn.Linear(4, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=2.2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        monitor = StabilityMonitor(model, optimizer, max_grad_norm=1e9) if protected else None
        losses = []
        for _ in range(40):
            for _ in range(25):
                optimizer.zero_grad()
                loss = (model(x).squeeze(-1) - y).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                losses.append(float(loss.detach()))
            if monitor is not None:
                monitor.check_training_stability(losses[-1], losses[-1])
                if not math.isfinite(losses[-1]):
                    nn.init.zeros_(model.weight)
        if monitor is not None:
            monitor.close()
        return losses[-1]

    assert not math.isfinite(train(protected=False))
    assert train(protected=True) < 1e-3


def test_losses_fall_in_the_healthy_case_without_any_correction() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with StabilityMonitor(model, optimizer) as monitor:
        x = torch.randn(32, 2)
        for _ in range(10):
            optimizer.zero_grad()
            loss = (model(x).squeeze(-1) - x.sum(1)).square().mean()
            loss.backward()
            assert not monitor.clip_gradients().skip
            optimizer.step()
            losses.append(float(loss.detach()))
            assert monitor.check_training_stability(losses[-1], losses[-1]) == []
        assert monitor.corrector.spent == 0
    assert all(b < a for a, b in pairwise(losses))
