"""GradientDiagnostics and the checks around it: each finds its trouble, and leaves the model as it was."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trimtab.compat.monitors.diagnostics import (
    GradientDiagnostics,
    assert_all_requires_grad,
    check_amp_underflow,
    check_gradient_flow,
    check_inplace_operations,
    setup_gradient_diagnostics,
    validate_training_setup,
)
from trimtab.core.errors import InputError

NAN, INF = float("nan"), float("inf")
X = torch.linspace(-1.0, 1.0, 24).reshape(8, 3)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "trimtab"):
        yield caplog


@pytest.fixture(autouse=True)
def anomaly_as_it_was() -> Iterator[None]:
    yield
    assert not torch.is_anomaly_enabled()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


class TwoHeads(nn.Module):
    """One head is used, the other never."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.used(x)
        return out


# --- E13, E14 the line and the counts


def test_e13_the_line(heard: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 1)
    model(torch.ones(1, 3)).sum().backward()
    GradientDiagnostics(log_interval=1).log_gradient_stats(0, model)
    assert heard.messages == [
        "[GRAD] Step    0 | Global: 2.00e+00 | Zero: 0/2 | NaN/Inf: 0/2 | Max: 1.73e+00 | Avg: 1.37e+00 | "
        "Range: [1.00e+00, 1.73e+00]"
    ]


def test_e13_then_the_parameters_in_trouble(heard: pytest.LogCaptureFixture) -> None:
    model = TwoHeads()
    model(X).sum().backward()
    assert model.used.weight.grad is not None
    model.used.weight.grad[0, 0], model.used.weight.grad[0, 1] = NAN, INF
    model.used.bias.grad = torch.full((1,), 1e-9)
    stats = GradientDiagnostics(log_interval=1).log_gradient_stats(3, model)
    assert stats is not None
    assert stats["problems"] == [
        "used.weight: 1 NaN and 1 Inf in the gradient",
        "used.bias: zero gradient (norm 1.00e-09)",
        "unused.weight: no gradient",
        "unused.bias: no gradient",
    ]
    assert heard.messages[1] == "[GRAD]   used.weight: 1 NaN and 1 Inf in the gradient"
    assert heard.messages[-1] == "[GRAD] 3 of 4 parameters have a zero gradient or none"
    assert (stats["num_zero"], stats["num_nonfinite"], stats["num_none"], stats["num_parameters"]) == (1, 1, 2, 4)


@pytest.mark.parametrize(("size", "word"), [(1e3, "above 100"), (1e-10, "below 1e-08"), (1.0, "")])
def test_e13_a_global_norm_out_of_bounds(size: float, word: str, heard: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[size, 0.0]])
    GradientDiagnostics(log_interval=1).log_gradient_stats(0, model)
    said = [m for m in heard.messages if "global norm" in m]
    assert [word in m for m in said] == ([True] if word else [])


def test_e13_many_troubles_do_not_flood_the_log(heard: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList([nn.Linear(1, 1) for _ in range(20)])
    stats = GradientDiagnostics(log_interval=1).log_gradient_stats(0, model)
    assert stats is not None
    assert len(stats["problems"]) == 40
    assert "[GRAD]   and 30 more" in heard.messages
    assert len(heard.messages) < 20


def test_e14_keys_and_counts_by_parameter() -> None:
    model = TwoHeads()
    model.used.bias.requires_grad_(False)
    with GradientDiagnostics(log_interval=1) as diagnostics:
        diagnostics.register_model_hooks(model)
        for step in range(3):
            model.zero_grad()
            model(torch.zeros(1, 3) if step == 1 else torch.tensor([[3.0, -4.0, 0.0]])).sum().backward()
            if step == 2:
                assert model.used.weight.grad is not None
                model.used.weight.grad[0, 0] = NAN
            stats = diagnostics.log_gradient_stats(step)
    assert stats is not None
    assert set(stats["parameters"]) == {"used.weight", "unused.weight", "unused.bias"}  # frozen ones are no trouble
    used = stats["parameters"]["used.weight"]
    assert [used[f"grad_{k}_count"] for k in ("is_none", "all_zero", "nan_inf")] == [0, 1, 1]
    unused = stats["parameters"]["unused.weight"]
    assert [unused[f"grad_{k}_count"] for k in ("is_none", "all_zero", "nan_inf")] == [3, 0, 0]
    assert math.isnan(unused["grad_norm"])


def test_e14_what_a_gradient_is_now() -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, -4.0]])
    stats = GradientDiagnostics(log_interval=1).log_gradient_stats(0, model)
    assert stats is not None
    assert stats["parameters"]["weight"] == {
        "grad_is_none_count": 0,
        "grad_all_zero_count": 0,
        "grad_nan_inf_count": 0,
        "grad_norm": 5.0,
        "grad_abs_mean": 3.5,
        "grad_abs_max": 4.0,
    }


def test_e14_an_old_gradient_is_not_taken_for_a_new_one() -> None:
    model = TwoHeads()
    model.unused.weight.grad = torch.full((1, 3), 1e6)  # left from some earlier time
    without = GradientDiagnostics(log_interval=1)
    with GradientDiagnostics(log_interval=1) as diagnostics:
        diagnostics.register_model_hooks(model)
        model(X).sum().backward()
        first, again = diagnostics.log_gradient_stats(0), diagnostics.log_gradient_stats(0)
        plain = without.log_gradient_stats(0, model)
    assert first is not None
    assert again is not None
    assert plain is not None
    assert (first["num_none"], again["num_none"], plain["num_none"]) == (2, 2, 1)
    assert first["max_norm"] < 1e3 < plain["max_norm"]


def test_e14_log_interval() -> None:
    model = net()
    model(X).sum().backward()
    diagnostics = GradientDiagnostics(log_interval=3)
    assert [diagnostics.log_gradient_stats(s, model) is not None for s in range(7)] == [True, False, False] * 2 + [True]


def test_e14_hooks_leave_no_trace() -> None:
    model = net()
    diagnostics = GradientDiagnostics()
    diagnostics.register_model_hooks(model)
    diagnostics.register_model_hooks(model)  # again is not twice
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())
    diagnostics.clear_hooks()
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    diagnostics.cleanup()
    diagnostics.cleanup()
    with pytest.raises(InputError, match="no model is known"):
        diagnostics.compute_global_grad_norm()


@pytest.mark.parametrize("settings", [{"log_interval": 0}, {"clip_grad_norm": -1.0}, {"clip_grad_norm": NAN}])
def test_e14_settings_that_mean_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="log_interval is"):
        GradientDiagnostics(**settings)


@pytest.mark.parametrize(("limit", "after"), [(0.0, 5.0), (1.0, 1.0), (10.0, 5.0)])
def test_e14_clipping(limit: float, after: float) -> None:
    model = nn.Linear(2, 1, bias=False)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    diagnostics = GradientDiagnostics(clip_grad_norm=limit)
    assert diagnostics.apply_gradient_clipping(model) == 5.0
    assert diagnostics.compute_global_grad_norm(model) == pytest.approx(after, rel=1e-5)


def test_e14_clipping_unscales_first() -> None:
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(model(torch.tensor([[0.3, 0.4]])).sum()).backward()
    diagnostics = GradientDiagnostics(clip_grad_norm=1.0)
    with pytest.raises(InputError, match="needs optimizer="):
        diagnostics.apply_gradient_clipping(model, scaler=scaler)
    assert diagnostics.apply_gradient_clipping(model, optimizer=optimizer, scaler=scaler) == pytest.approx(0.5)
    assert diagnostics.compute_global_grad_norm(model) == pytest.approx(0.5)


def test_e14_anomaly_detection_is_left_as_it_was_found() -> None:
    with GradientDiagnostics(detect_anomaly=True) as diagnostics:
        assert torch.is_anomaly_enabled()
        diagnostics.disable_anomaly_detection()
        assert not torch.is_anomaly_enabled()
        diagnostics.enable_anomaly_detection()
    assert not torch.is_anomaly_enabled()
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    try:
        with GradientDiagnostics(detect_anomaly=True) as diagnostics:
            assert torch.is_anomaly_check_nan_enabled()
            diagnostics.disable_anomaly_detection()
        assert torch.is_anomaly_enabled()
        assert not torch.is_anomaly_check_nan_enabled()
    finally:
        torch.autograd.set_detect_anomaly(False)


@pytest.mark.filterwarnings("ignore:Error detected in")  # what anomaly detection says, beside what it raises
def test_e14_anomaly_detection_works() -> None:
    x = torch.zeros(1, requires_grad=True)
    with GradientDiagnostics(detect_anomaly=True), pytest.raises(RuntimeError, match="nan values"):
        (torch.sqrt(x) * 0.0).sum().backward()


def test_e14_setup(heard: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    with setup_gradient_diagnostics(model, optimizer, log_interval=1, clip_grad_norm=0.1, device="meta") as diagnostics:
        assert "training setup: the learning rate of group 0 is 5, suspicious above 1" in heard.messages
        assert any("not on meta: 0.weight" in m for m in heard.messages)
        model(X).sum().backward()
        diagnostics.apply_gradient_clipping()
        assert diagnostics.compute_global_grad_norm() == pytest.approx(0.1, rel=1e-4)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


# --- E3, E14 underflow


def gradient(*values: float) -> nn.Module:
    model = nn.Linear(len(values), 1, bias=False)
    model.weight.grad = torch.tensor([values])
    return model


def test_e14_underflow_is_measured_at_the_scale_in_use() -> None:
    model = gradient(1.0, 1e-5, 1e-9, 0.0)  # fine, subnormal and lost in float16; a true zero does not count
    bare = check_amp_underflow(model)
    assert bare.underflow_frac == pytest.approx(1 / 3)
    assert bare.subnormal_frac == pytest.approx(1 / 3)
    assert bare.underflow
    assert bare.worst == ("weight",)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    unscaled = check_amp_underflow(model, scaler, unscaled=True)
    assert (unscaled.underflow_frac, unscaled.subnormal_frac) == (0.0, pytest.approx(0.0))
    scaled = check_amp_underflow(model, scaler)  # still scaled: judged as they are
    assert scaled.underflow_frac == pytest.approx(1 / 3)


def test_e14_underflow_agrees_with_what_float16_does() -> None:
    torch.manual_seed(3)
    values = torch.exp(torch.empty(10_000).uniform_(-25.0, 0.0))
    model = nn.Linear(10_000, 1, bias=False)
    model.weight.grad = values.reshape(1, -1)
    found = check_amp_underflow(model)
    half = values.half()
    lost = float((half == 0).float().mean())
    dim = float(((half > 0) & (half < 2.0**-14)).float().mean())
    assert found.underflow_frac == pytest.approx(lost, abs=0.04)  # float16 rounds some of them up to its smallest
    assert found.underflow_frac + found.subnormal_frac == pytest.approx(lost + dim, abs=0.002)


def test_e14_the_scaler_knows_whether_gradients_were_unscaled() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)
    scaler.scale(model(torch.full((1, 1), 1e-8)).sum()).backward()
    assert check_amp_underflow(model, scaler).underflow_frac == 0.0
    scaler.unscale_(optimizer)
    assert check_amp_underflow(model, scaler).underflow_frac == 0.0
    assert check_amp_underflow(model).underflow_frac == 1.0


def test_e14_a_collapsed_scale_is_called_by_its_name(heard: pytest.LogCaptureFixture) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    model = gradient(1.0)
    found = GradientDiagnostics().check_amp_underflow(scaler, model)
    assert found
    assert (found.backed_off, found.underflow, found.scale) == (True, False, 1.0)
    assert heard.messages == ["AMP: the loss scale is down to 1, backed off by one overflow after the other"]
    assert not check_amp_underflow(model, torch.amp.GradScaler("cpu", init_scale=2.0))


def test_e14_underflow_is_logged_with_the_worst(heard: pytest.LogCaptureFixture) -> None:
    assert GradientDiagnostics().check_amp_underflow(model=gradient(1e-9, 1.0))
    assert heard.messages == ["AMP underflow: 50% of the gradient is lost in float16; worst weight"]
    assert not GradientDiagnostics().check_amp_underflow(model=gradient(1.0))
    assert not GradientDiagnostics().check_amp_underflow(model=net())  # no gradients, no loss


# --- E1, E16 the setup


def test_e16_a_sound_setup_is_silent_but_for_its_groups(heard: pytest.LogCaptureFixture) -> None:
    model = net()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    report = validate_training_setup(model, torch.optim.AdamW(groups, lr=0.1, weight_decay=0.01), device="cpu")
    assert (report.ok, report.problems, report.warnings) == (True, (), ())
    assert heard.messages == [
        "group 0: 2 parameters, learning rate 0.1, weight decay 0.01",
        "group 1: 2 parameters, learning rate 0.5, weight decay 0.01",
    ]


@pytest.mark.parametrize("lr", [1.0, 1e-8])
def test_e13_rates_on_the_bounds_are_fine(lr: float) -> None:
    model = net()
    assert validate_training_setup(model, torch.optim.SGD(model.parameters(), lr=lr)).warnings == ()


@pytest.mark.parametrize(("lr", "word"), [(1.5, "above 1"), (1e-9, "below 1e-08")])
def test_e13_suspicious_rates(lr: float, word: str) -> None:
    model = net()
    (warning,) = validate_training_setup(model, torch.optim.SGD(model.parameters(), lr=lr)).warnings
    assert word in warning


def problems_of(model: nn.Module, optimizer: Any, **more: Any) -> str:
    report = validate_training_setup(model, optimizer, **more)
    assert not report.ok
    (problem,) = report.problems
    return problem


def test_e1_an_optimizer_that_does_not_belong_to_the_model() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model[2] = nn.Linear(4, 1)
    problems = validate_training_setup(model, optimizer).problems
    assert problems == (
        "the optimizer does not hold 2.weight, 2.bias",
        "the optimizer holds 2 parameters that are not the model's",
    )


def test_e16_nothing_to_train_and_bad_weights() -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model[0].weight[0, 0] = NAN
    assert problems_of(model, optimizer) == "NaN or Inf in 0.weight"
    with torch.no_grad():
        model[0].weight[0, 0] = 0.0
    model.requires_grad_(False)
    assert problems_of(model, optimizer) == "none of the 4 parameters is trainable"


def test_e1_state_on_another_device_than_its_parameter() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.state[model.weight]["step"] = torch.zeros((), device="meta")  # a counter may be anywhere
    assert validate_training_setup(model, optimizer).ok
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(1, 2, device="meta")
    assert "1 tensors of the state of Adam" in problems_of(model, optimizer)


def test_e3_a_scaler_cannot_unscale_float16_parameters() -> None:
    model = net().half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "cannot unscale float16" in problems_of(model, optimizer, scaler=torch.amp.GradScaler("cpu"))
    assert validate_training_setup(model, optimizer, scaler=torch.amp.GradScaler("cpu", enabled=False)).ok


def test_e17_evaluation_mode_is_told() -> None:
    model = net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert validate_training_setup(model, optimizer).warnings == ("the model is in evaluation mode",)
    assert validate_training_setup(model, optimizer, training=None).warnings == ()


def test_e14_assert_all_requires_grad() -> None:
    model = net()
    assert_all_requires_grad(model)
    model[0].requires_grad_(False)
    with pytest.raises(InputError, match=r"2 of 4 parameters do not require a gradient: 0\.weight, 0\.bias"):
        assert_all_requires_grad(model)
    assert_all_requires_grad(model, frozen=["0.*"])


# --- E4 in-place operations


class Hazard(nn.Module):
    """The parent itself changes what a child has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.first(x))
        y.add_(1.0)
        out: Tensor = self.second(y)
        return out


def breaks(model: nn.Module) -> bool:
    """What autograd itself says."""
    try:
        copy.deepcopy(model)(X).sum().backward()
    except RuntimeError as error:
        return "inplace operation" in str(error)
    return False


HAZARDS: dict[str, tuple[nn.Module, str, str, str]] = {
    "relu after sigmoid": (
        nn.Sequential(nn.Linear(3, 3), nn.Sigmoid(), nn.ReLU(inplace=True)),
        "1",
        "2",
        "SigmoidBackward0",
    ),
    "dropout after relu": (
        nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Dropout(0.5, inplace=True)),
        "1",
        "2",
        "ReluBackward0",
    ),
    "in the parent": (Hazard(), "Hazard", "Hazard", "TanhBackward0"),
}
HARMLESS: dict[str, nn.Module] = {
    "relu after linear": nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 1)),
    "batch norm": nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(inplace=True), nn.Dropout(0.5)),
    "dropout after linear": nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5, inplace=True)),
    "transformer": nn.TransformerEncoderLayer(3, 1, 8),
    "spectral norm": nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)), nn.ReLU(True)),
}


@pytest.mark.parametrize("kind", HAZARDS)
def test_e4_a_real_hazard_is_named(kind: str) -> None:
    model, saved_in, changed_in, operation = HAZARDS[kind]
    assert breaks(model), "no hazard at all: the case proves nothing"
    hazards = check_inplace_operations(model, X)
    assert [(h.saved_in, h.changed_in, h.operation) for h in hazards] == [(saved_in, changed_in, operation)]
    assert changed_in in str(hazards[0])


@pytest.mark.parametrize("kind", HARMLESS)
def test_e4_a_harmless_inplace_is_not_reported(kind: str) -> None:
    model = HARMLESS[kind]
    assert not breaks(model)
    assert check_inplace_operations(model, X) == []


def test_e4_a_function_and_its_loss() -> None:
    model = Hazard()
    hazards = check_inplace_operations(lambda x: model(x).square().mean(), X, model=model)
    assert [h.changed_in for h in hazards] == ["Hazard"]
    assert check_inplace_operations(lambda x: model(x).mean(), X)[0].changed_in == "outside of any module"
    fine = net()
    assert check_inplace_operations(fine, X, loss_fn=lambda out: out.square().mean()) == []


def test_e4_what_autograd_refuses_outright_is_translated() -> None:
    class Leaf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.add_(1.0)
            return x * self.weight

    model = nn.Sequential(nn.Identity(), Leaf())
    (hazard,) = check_inplace_operations(model, X)
    assert hazard.changed_in == "1"
    assert "leaf" in str(hazard)


def test_e4_other_errors_are_the_callers() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        check_inplace_operations(net(), torch.ones(2, 7))
    with pytest.raises(InputError, match="requires a gradient"):
        check_inplace_operations(net().requires_grad_(False), X)


def test_e4_outputs_of_any_shape() -> None:
    model = net()
    assert check_inplace_operations(lambda x: {"a": [model(x), "text"], "b": (model(x),)}, X) == []


# --- E4 gradient flow


def state(model: nn.Module) -> list[Any]:
    buffers = [b.clone() for b in model.buffers()]
    grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [[m.training for m in model.modules()], buffers, grads, torch.get_rng_state()]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def test_e4_a_check_leaves_no_trace() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
    model(X).sum().backward()
    model[2].eval()
    before = state(model)

    def step() -> Tensor:
        model.train()
        out: Tensor = model(X).square().mean()
        return out

    assert check_gradient_flow(model, step).ok
    assert same(before, state(model))
    assert check_inplace_operations(model, X) == []
    assert same(before, state(model))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_e4_a_check_that_raises_leaves_no_trace_either() -> None:
    model = net()
    model(X).sum().backward()
    before = state(model)

    def step() -> Tensor:
        model.eval()
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        check_gradient_flow(model, step)
    assert same(before, state(model))


def test_e4_flow_is_measured_not_read_from_old_gradients() -> None:
    model = TwoHeads()
    for p in model.parameters():
        p.grad = torch.ones_like(p)  # left from some earlier time: everything looks fine
    flow = check_gradient_flow(model, lambda x: model(x).sum(), X)
    assert not flow.ok
    assert flow.missing == ("unused.weight", "unused.bias")
    assert set(flow.norms) == {"used.weight", "used.bias"}
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters() if p.grad is not None)


def test_e4_a_loss_tensor_can_still_be_used() -> None:
    model = net()
    loss = model(X).square().mean()
    assert check_gradient_flow(model, loss).ok
    assert all(p.grad is None for p in model.parameters())
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_e4_a_function_that_calls_backward_itself_will_do() -> None:
    model = net()

    def step() -> Tensor:
        loss: Tensor = model(X).square().mean()
        loss.backward()
        return loss

    assert check_gradient_flow(model, step).ok
    assert check_gradient_flow(model, lambda: step() and None).ok
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("reentrant", [True, False])
def test_e4_checkpointing_is_no_obstacle(reentrant: bool) -> None:
    model = net()

    def step() -> Tensor:
        out: Tensor = checkpoint(model, X.clone().requires_grad_(), use_reentrant=reentrant).sum()
        return out

    assert check_gradient_flow(model, step).ok
    assert all(p.grad is None for p in model.parameters())


def test_e2_a_detached_loss_is_found() -> None:
    model = net()
    flow = check_gradient_flow(model, lambda: model(X).detach().sum())
    assert flow.detached
    assert len(flow.missing) == 4
    assert check_gradient_flow(model, torch.tensor(1.0)).detached


def test_e4_zero_and_nonfinite_gradients_are_told_apart_and_frozen_ones_excused() -> None:
    model = TwoHeads()
    model.unused.bias.requires_grad_(False)
    flow = check_gradient_flow(model, lambda: model(X).sum() * NAN + model.unused.weight.sum() * 0.0)
    assert flow.nonfinite == ("used.weight", "used.bias")
    assert flow.zero == ("unused.weight",)
    assert flow.frozen == ("unused.bias",)
    assert not flow.missing


def test_e4_what_is_no_loss_is_refused() -> None:
    model = net()
    with pytest.raises(InputError, match="expected one number"):
        check_gradient_flow(model, lambda: model(X))
    with pytest.raises(InputError, match="left no gradients"):
        check_gradient_flow(model, lambda: None)
