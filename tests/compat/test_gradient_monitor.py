"""GradientHealthMonitor: the documented names and keys, and what the documented tool gets wrong done right."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trimtab.compat.monitors import GradientHealthMonitor
from trimtab.compat.monitors.gradient_monitor import CLIP_ABOVE, CLIP_TO, HEALTHY_NORM, KEPT
from trimtab.compat.monitors.norm_functions import snapshot
from trimtab.core.errors import InputError
from trimtab.core.types import ABSENT, FROZEN

KEYS = {
    "global_grad_norm",
    "max_grad_norm",
    "min_grad_norm",
    "mean_grad_norm",
    "has_nan",
    "has_inf",
    "layer_stats",
    "recommendations",
    "param_count",
    "params_with_grads",
}


def mlp(scale: float = 1.0) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    (scale * model(torch.randn(16, 4)).square().mean()).backward()
    return model


def sigmoid_stack(depth: int = 12) -> nn.Sequential:
    layers = [m for _ in range(depth) for m in (nn.Linear(16, 16), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    model(torch.randn(32, 16)).square().mean().backward()
    return model


def set_gradients(model: nn.Module, value: float) -> None:
    for p in model.parameters():
        p.grad = torch.full_like(p, value)


def has(stats: dict[str, Any], word: str) -> bool:
    return any(word in text for text in stats["recommendations"])


# -- the snapshot all faces share ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_snapshot_equals_torch_in_every_precision(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    seen = snapshot(model)
    close: Any = {"rel": 1e-5, "abs": 1e-7}
    for i, (name, p) in enumerate(model.named_parameters()):
        assert p.grad is not None
        g = p.grad.double()
        assert (seen.names[i], seen.shapes[i], seen.numel[i]) == (name, tuple(p.shape), p.numel())
        assert seen.norms[i] == pytest.approx(float(g.norm()), **close)
        assert seen.mean[i] == pytest.approx(float(g.mean()), **close)
        assert seen.std[i] == pytest.approx(float(g.std()), rel=1e-4, abs=1e-7)
        assert (seen.min[i], seen.max[i]) == (float(g.min()), float(g.max()))
        assert seen.abs_mean[i] == pytest.approx(float(g.abs().mean()), **close)
        assert seen.absmax[i] == float(g.abs().max())
    whole = torch.cat([p.grad.double().reshape(-1) for p in model.parameters() if p.grad is not None])
    assert seen.global_norm == pytest.approx(float(whole.norm()), **close)
    quick = snapshot(model, detailed=False)
    np.testing.assert_allclose(quick.norms, seen.norms, rtol=1e-5)
    assert quick.global_norm == pytest.approx(seen.global_norm, rel=1e-5)
    assert np.isnan(quick.mean).all()


def test_snapshot_tells_frozen_from_missing_from_zero() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.LazyLinear(3))
    model[0].requires_grad_(False)
    model[1].weight.grad = torch.zeros(2, 2)
    seen = snapshot(model)
    assert seen.norms.tolist() == [FROZEN, FROZEN, 0.0, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT]
    assert seen.frozen == ("0.weight", "0.bias")
    assert seen.absent[0] == "1.bias"
    assert seen.present.tolist() == [False, False, True, False, False, False, False, False]
    assert seen.global_norm == 0.0
    assert snapshot(nn.Identity()).global_norm == 0.0


@pytest.mark.parametrize("detailed", [True, False])
def test_snapshot_of_awkward_values(detailed: bool) -> None:
    values = [
        torch.tensor([1.0, math.nan, math.nan]),
        torch.tensor([math.inf, 2.0]),
        torch.full((4,), 1e20),
        torch.full((9,), 1e-30),
        torch.full((4,), 3e38),
        torch.zeros(0),
        torch.tensor(7.0),
    ]
    params = [nn.Parameter(torch.zeros_like(v)) for v in values]
    for p, v in zip(params, values, strict=True):
        p.grad = v
    seen = snapshot(params, detailed=detailed)
    assert seen.nan.tolist() == [2, 0, 0, 0, 0, 0, 0]
    assert seen.inf.tolist() == [0, 1, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(seen.norms, [math.nan, math.inf, 2e20, 3e-30, 6e38, 0.0, 7.0], rtol=1e-5)
    assert math.isnan(seen.global_norm)
    if detailed:
        assert seen.std[6] == 0.0, "one element has no spread, not an undefined one"
        assert seen.std[2] == 0.0
        np.testing.assert_allclose(seen.abs_mean[2:5], [1e20, 1e-30, 3e38], rtol=1e-5)
        assert math.isnan(seen.max[0])
        assert seen.max[1] == math.inf
    assert snapshot(params[2:5], detailed=detailed).global_norm == pytest.approx(6e38, rel=1e-5)


def test_snapshot_of_sparse_and_complex_gradients() -> None:
    table = nn.Embedding(10, 2, sparse=True)
    table(torch.tensor([1, 1, 3])).sum().backward()
    dense = nn.Embedding.from_pretrained(table.weight.detach(), freeze=False)
    dense(torch.tensor([1, 1, 3])).sum().backward()
    a, b = snapshot(table), snapshot(dense)
    for column in ("norms", "mean", "std", "max", "min", "absmax", "abs_mean", "zero_frac", "numel"):
        np.testing.assert_allclose(getattr(a, column), getattr(b, column), rtol=1e-5, err_msg=column)
    wave = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    wave.grad = torch.tensor([3.0 + 4.0j, 0.0])
    assert snapshot([wave]).norms.tolist() == [5.0]


# -- A4, A5: arguments and keys --------------------------------------------------------------------------------------


def test_a4_documented_defaults() -> None:
    monitor = GradientHealthMonitor(nn.Linear(1, 1))
    assert (monitor.grad_clip_threshold, monitor.vanishing_threshold) == (1.0, 1e-7)
    assert (monitor.exploding_threshold, monitor.log_frequency) == (100.0, 100)
    assert monitor.enable_detailed_logging is True


def test_a4_every_argument_has_an_effect(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    assert has(GradientHealthMonitor(model, vanishing_threshold=1e9).check_gradients(), "Vanishing")
    assert has(GradientHealthMonitor(model, exploding_threshold=1e-9).check_gradients(), "Exploding")
    assert GradientHealthMonitor(model, enable_detailed_logging=False).check_gradients()["layer_stats"] == {}
    for every, num in ((1, 10), (5, 2)):
        caplog.clear()
        monitor = GradientHealthMonitor(model, log_frequency=every)
        with caplog.at_level(logging.INFO, logger="trimtab"):
            for step in range(10):
                monitor.log_statistics(monitor.check_gradients(), step=step)
        assert caplog.text.count("Gradient Health") == num
    set_gradients(model, 1.0)
    GradientHealthMonitor(model, grad_clip_threshold=0.25).apply_gradient_clipping()
    assert snapshot(model).global_norm == pytest.approx(0.25, rel=1e-4)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ({"grad_clip_threshold": -1.0}, "grad_clip_threshold is -1"),
        ({"vanishing_threshold": math.nan}, "vanishing_threshold is nan"),
        ({"log_frequency": 0}, "log_frequency is 0"),
        ({"model": "resnet"}, "the model is a str"),
    ],
)
def test_a4_impossible_arguments_are_refused(bad: dict[str, Any], text: str) -> None:
    with pytest.raises(InputError, match=text):
        GradientHealthMonitor(**{"model": nn.Linear(1, 1), **bad})


@pytest.mark.parametrize("detailed", [True, False])
def test_a5_check_gradients_keys(detailed: bool) -> None:
    model = mlp()
    stats = GradientHealthMonitor(model, enable_detailed_logging=detailed).check_gradients()
    assert set(stats) == KEYS
    norms = [float(p.grad.norm()) for p in model.parameters() if p.grad is not None]
    assert stats["global_grad_norm"] == pytest.approx(math.hypot(*norms), rel=1e-5)
    assert stats["max_grad_norm"] == pytest.approx(max(norms), rel=1e-5)
    assert stats["min_grad_norm"] == pytest.approx(min(norms), rel=1e-5)
    assert stats["mean_grad_norm"] == pytest.approx(sum(norms) / 4, rel=1e-5)
    assert (stats["has_nan"], stats["has_inf"]) == (False, False)
    assert (stats["param_count"], stats["params_with_grads"]) == (4, 4)
    assert stats["recommendations"] == []
    if detailed:
        assert list(stats["layer_stats"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
        layer = stats["layer_stats"]["0.weight"]
        assert set(layer) == {"norm", "mean", "std", "max", "min", "shape"}
        assert layer["shape"] == (8, 4)
        grad = model[0].weight.grad
        assert isinstance(grad, Tensor)
        assert (layer["max"], layer["min"]) == (float(grad.max()), float(grad.min()))
        assert layer["std"] == pytest.approx(float(grad.std()), rel=1e-4)


@pytest.mark.parametrize(("bad", "key"), [(math.nan, "has_nan"), (math.inf, "has_inf")])
@pytest.mark.parametrize("where", [0, 1, 3])
@pytest.mark.parametrize("detailed", [True, False])
def test_a5_a_bad_layer_never_drops_out(bad: float, key: str, where: int, detailed: bool) -> None:
    model = mlp()
    grad = list(model.parameters())[where].grad
    assert grad is not None
    grad.view(-1)[0] = bad
    stats = GradientHealthMonitor(model, enable_detailed_logging=detailed).check_gradients()
    assert stats[key] is True
    assert stats["has_nan"] != stats["has_inf"]
    assert not math.isfinite(stats["max_grad_norm"])
    assert not math.isfinite(stats["global_grad_norm"])
    if math.isnan(bad):
        assert math.isnan(stats["min_grad_norm"])
    assert stats["recommendations"][0].startswith("CRITICAL")
    assert list(dict(model.named_parameters()))[where] in stats["recommendations"][0]


def test_a5_no_gradients_at_all() -> None:
    model = nn.Linear(2, 2)
    stats = GradientHealthMonitor(model).check_gradients()
    assert (stats["min_grad_norm"], stats["max_grad_norm"], stats["mean_grad_norm"]) == (0.0, 0.0, 0.0)
    assert stats["params_with_grads"] == 0
    assert "backward" in stats["recommendations"][0]
    model.requires_grad_(False)
    assert "frozen" in GradientHealthMonitor(model).check_gradients()["recommendations"][0]


def test_a5_huge_finite_gradients_have_a_finite_norm() -> None:
    model = mlp()
    set_gradients(model, 1e30)
    stats = GradientHealthMonitor(model).check_gradients()
    assert stats["global_grad_norm"] == pytest.approx(1e30 * math.sqrt(67), rel=1e-5)
    assert stats["has_inf"] is False
    assert has(stats, "Exploding")


def test_frozen_parameters_are_not_reported_as_missing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model[2](model[0](torch.randn(3, 4))).sum().backward()
    stats = GradientHealthMonitor(model).check_gradients()
    assert (stats["param_count"], stats["params_with_grads"]) == (6, 2)
    (text,) = stats["recommendations"]
    assert text.startswith("2 trainable parameters have no gradient: 1.weight, 1.bias")


# -- A10, A12: what is trouble and what is not -----------------------------------------------------------------------


def test_a10_a_deep_sigmoid_network_vanishes_and_is_named() -> None:
    stats = GradientHealthMonitor(sigmoid_stack()).check_gradients()
    (text,) = stats["recommendations"]
    assert text.startswith(f"⚠️ Vanishing gradients detected (min norm={stats['min_grad_norm']:.1e})!\n   Consider: (1)")
    assert "0.weight" in text
    summary = GradientHealthMonitor(sigmoid_stack()).get_gradient_flow_summary()
    assert "0.weight" in dict(summary["layers_with_vanishing_grads"])


def test_a10_gradients_too_small_for_float32_squares_vanish_too() -> None:
    model = mlp()
    set_gradients(model, 1e-30)
    stats = GradientHealthMonitor(model).check_gradients()
    assert stats["min_grad_norm"] > 0
    assert has(stats, "Vanishing gradients detected (min norm=1.7e-30)!")


class Attention(nn.Module):
    """Attention with a key bias of its own, whose gradient is zero: softmax does not see a shift."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class SharedOffset(nn.Module):
    """A bias that stands alone before a normalisation, kept in two dimensions."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width, bias=False)
        self.offset_bias = nn.Parameter(torch.zeros(2, width // 2))
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.mix(x) + self.offset_bias.reshape(1, -1))
        return out


class UnusedTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x + 0.0 * self.table.weight[0])
        return out


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("make", "quiet"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)), "0.bias"),
        (lambda: nn.Sequential(Attention(), nn.Linear(8, 1)), "0.k_proj.bias"),
        (lambda: nn.Sequential(SharedOffset(), nn.Linear(8, 1)), "0.offset_bias"),
        (UnusedTable, "table.weight"),
    ],
)
def test_a10_structural_zeros_are_no_vanishing_gradients(make: Any, quiet: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = make()
    inputs = torch.randn(4, 6, 8) if isinstance(model, nn.Sequential) and isinstance(model[0], Attention) else None
    monitor = GradientHealthMonitor(model, vanishing_threshold=1e-5)
    for _ in range(5):
        model.zero_grad()
        (model(torch.randn(32, 8) if inputs is None else inputs) - 1.0).square().mean().backward()
        stats = monitor.check_gradients()
        assert stats["layer_stats"][quiet]["norm"] < 1e-5, "or the test shows nothing"
        assert stats["recommendations"] == []
        summary = monitor.get_gradient_flow_summary()
        assert summary["layers_with_vanishing_grads"] == []
        assert quiet in dict(summary["layers_with_healthy_grads"])


def test_a10_a_lone_bottleneck_does_vanish() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    set_gradients(model, 0.1)
    model[0].weight.grad = torch.full((4, 4), 1e-10)
    assert has(GradientHealthMonitor(model).check_gradients(), "Vanishing gradients detected (min norm=4.0e-10)!")


def test_a10_a_loss_that_depends_on_nothing_gives_zeros() -> None:
    model = mlp(scale=0.0)
    monitor = GradientHealthMonitor(model)
    (text,) = monitor.check_gradients()["recommendations"]
    assert "Vanishing" in text
    assert "4 of 4 gradients are exactly zero" in text
    assert len(monitor.get_gradient_flow_summary()["layers_with_vanishing_grads"]) == 4


def test_a12_thresholds_and_order_of_what_is_said() -> None:
    assert HEALTHY_NORM == (0.1, 10.0)
    model = mlp()
    set_gradients(model, 1e3)
    model[0].weight.grad = torch.full((8, 4), 1e-12)
    assert model[2].bias.grad is not None
    model[2].bias.grad[0] = math.nan
    model[2].weight.grad = None
    texts = GradientHealthMonitor(model).check_gradients()["recommendations"]
    assert [t.split()[0] for t in texts] == ["CRITICAL:", "⚠️", "1"]
    assert texts[1].startswith("⚠️ Vanishing")
    assert model[2].bias.grad is not None
    model[2].bias.grad[0] = 0.0
    texts = GradientHealthMonitor(model).check_gradients()["recommendations"]
    assert [t.split()[1] for t in texts] == ["Exploding", "Vanishing", "trainable"]


# -- A6, A11, A14: logging -------------------------------------------------------------------------------------------


def stats_of(**changed: Any) -> dict[str, Any]:
    return GradientHealthMonitor(mlp()).check_gradients() | changed


def test_a11_the_documented_lines(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp(scale=1e5)
    monitor = GradientHealthMonitor(model)
    stats = monitor.check_gradients()
    with caplog.at_level(logging.INFO, logger="trimtab"):
        monitor.log_statistics(stats, step=150)
    info, warning = caplog.records
    assert info.levelno == logging.INFO
    assert info.getMessage() == (
        f"Step 150 - Gradient Health: Global Norm={stats['global_grad_norm']:.4f}, Max={stats['max_grad_norm']:.4f}, "
        f"Min={stats['min_grad_norm']:.2e}, Mean={stats['mean_grad_norm']:.4f}"
    )
    assert warning.levelno == logging.WARNING
    assert warning.getMessage() == (
        f"⚠️ Exploding gradients detected (norm={stats['global_grad_norm']:.2f})!\n"
        "   Consider: (1) Gradient clipping, (2) Reducing learning rate"
    )
    assert not logging.getLogger("trimtab").handlers, "handlers are the user's business"


def test_a6_trouble_is_told_at_once_and_then_on_the_cadence(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    monitor = GradientHealthMonitor(model, log_frequency=10)
    calm, wild = stats_of(), stats_of(recommendations=["⚠️ Exploding gradients detected (norm=125.43)!"])
    told = []
    for step in range(41):
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="trimtab"):
            monitor.log_statistics(wild if 13 <= step < 37 else calm, step=step)
        told.append((step, [r.levelname for r in caplog.records]))
    assert [(step, levels) for step, levels in told if levels] == [
        (0, ["INFO"]),
        (10, ["INFO"]),
        (13, ["INFO", "WARNING"]),
        (20, ["INFO", "WARNING"]),
        (30, ["INFO", "WARNING"]),
        (40, ["INFO"]),
    ]


def test_a6_what_is_no_danger_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[0](torch.ones(1, 2)).sum().backward()
    monitor = GradientHealthMonitor(model, log_frequency=1)
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        for step in range(5):
            monitor.log_statistics(monitor.check_gradients(), step=step)
    assert len(caplog.records) == 1


class WandbLike:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int | None]] = []

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        self.calls.append((values, step))


class LightningLike:
    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))


A14_KEYS = {
    *(f"grad/{name}" for name in ("global_norm", "max_norm", "min_norm", "mean_norm", "has_nan", "has_inf")),
    *(
        f"grad_layer/{layer}/{what}"
        for layer in ("0/weight", "0/bias", "2/weight", "2/bias")
        for what in ("norm", "mean", "std")
    ),
}


@pytest.mark.parametrize("logger", [WandbLike(), LightningLike()])
def test_a14_keys_reach_dict_loggers_in_one_call(logger: Any) -> None:
    monitor = GradientHealthMonitor(mlp())
    stats = monitor.check_gradients()
    monitor.log_statistics(stats, step=3, logger=logger)
    ((values, step),) = logger.calls
    assert set(values) == A14_KEYS
    assert step == 3
    assert values["grad/global_norm"] == stats["global_grad_norm"]
    assert values["grad/has_nan"] == 0.0
    assert values["grad_layer/0/weight/std"] == stats["layer_stats"]["0.weight"]["std"]
    assert all(isinstance(v, float) for v in values.values())


def test_a14_without_details_there_are_no_layers() -> None:
    logger = WandbLike()
    monitor = GradientHealthMonitor(mlp(), enable_detailed_logging=False)
    monitor.log_statistics(monitor.check_gradients(), step=0, logger=logger)
    assert set(logger.calls[0][0]) == {key for key in A14_KEYS if key.startswith("grad/")}


def test_a15_any_logger_with_a_log_method_and_the_others(caplog: pytest.LogCaptureFixture) -> None:
    class Plain:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def log(self, values: Any) -> None:
            self.got.append(values)

    monitor = GradientHealthMonitor(mlp())
    stats = monitor.check_gradients()
    plain = Plain()
    monitor.log_statistics(stats, step=0, logger=plain)
    assert set(plain.got[0]) == A14_KEYS
    seen: list[dict[str, float]] = []
    monitor.log_statistics(stats, step=0, logger=seen.append)
    assert set(seen[0]) == {"step", *A14_KEYS}
    own = logging.getLogger("my.training")
    with caplog.at_level(logging.INFO, logger="my.training"):
        monitor.log_statistics(stats, step=0, logger=own)
    (record,) = caplog.records
    assert (record.name, record.getMessage()[:25]) == ("my.training", "Step 0 - Gradient Health:")
    with pytest.raises(InputError, match="int cannot take"):
        monitor.log_statistics(stats, step=0, logger=17)


def test_a15_a_logger_that_counts_for_itself_is_not_told_a_step() -> None:
    monitor = GradientHealthMonitor(mlp(), log_frequency=1)
    for logger in (WandbLike(), LightningLike()):
        monitor.log_statistics(monitor.check_gradients(), logger=logger)
        assert logger.calls[0][1] is None


def test_a15_a_logger_that_breaks_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def log(self, values: Any) -> None:
            raise ConnectionError("no route")

    monitor = GradientHealthMonitor(mlp())
    monitor.log_statistics(monitor.check_gradients(), step=0, logger=Broken())
    assert "training continues" in caplog.text


# -- A7, A13: clipping -----------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(scale=st.floats(1e-3, 1e6), max_norm=st.floats(1e-2, 1e2), seed=st.integers(0, 99))
def test_a7_clipping_equals_torch(scale: float, max_norm: float, seed: int) -> None:
    torch.manual_seed(seed)
    model = mlp(scale)
    twin = copy.deepcopy(model)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    exact = [p.grad.double() for p in model.parameters() if p.grad is not None]
    norm = float(torch.cat([g.reshape(-1) for g in exact]).norm())
    got = GradientHealthMonitor(model).apply_gradient_clipping(max_norm=max_norm)
    want = float(nn.utils.clip_grad_norm_(twin.parameters(), max_norm))
    assert isinstance(got, float)
    assert got == pytest.approx(want, rel=1e-6)
    assert got == pytest.approx(norm, rel=1e-5)
    for p, q, g in zip(model.parameters(), twin.parameters(), exact, strict=True):
        assert p.grad is not None
        assert q.grad is not None
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-6, atol=1e-12)
        torch.testing.assert_close(p.grad.double(), g * min(1.0, max_norm / (norm + 1e-6)), rtol=1e-5, atol=1e-9)


def test_a7_huge_and_bad_gradients(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    set_gradients(model, 1e20)
    monitor = GradientHealthMonitor(model)
    assert monitor.apply_gradient_clipping() == pytest.approx(1e20 * math.sqrt(67), rel=1e-5)
    assert snapshot(model).global_norm == pytest.approx(1.0, rel=1e-4)
    assert model[0].weight.grad is not None
    model[0].weight.grad[0, 0] = math.nan
    before = model[2].weight.grad.clone()
    assert math.isnan(monitor.apply_gradient_clipping(0.1))
    assert torch.equal(model[2].weight.grad, before)
    assert "not clipped" in caplog.text
    assert GradientHealthMonitor(nn.Linear(1, 1)).apply_gradient_clipping() == 0.0


def test_a13_the_quick_start_rule() -> None:
    assert (CLIP_ABOVE, CLIP_TO) == (10.0, 1.0)
    for scale, after in ((1.0, None), (1e4, 1.0)):
        monitor = GradientHealthMonitor(mlp(scale))
        stats = monitor.check_gradients()
        if stats["global_grad_norm"] > CLIP_ABOVE:
            monitor.apply_gradient_clipping(max_norm=CLIP_TO)
        now = monitor.check_gradients()["global_grad_norm"]
        assert now == pytest.approx(after if after else stats["global_grad_norm"], rel=1e-4)


# -- A8, A9: summary and memory --------------------------------------------------------------------------------------


def test_a8_flow_summary() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(5)))
    for layer, value in zip(model, (1e-10, 0.1, 1e3, math.nan, None), strict=True):
        layer.weight.grad = None if value is None else torch.full((4, 4), value)  # type: ignore[assignment]
    summary = GradientHealthMonitor(model).get_gradient_flow_summary()
    assert set(summary) == {
        "layers_with_vanishing_grads",
        "layers_with_exploding_grads",
        "layers_with_healthy_grads",
    }
    assert summary["layers_with_vanishing_grads"] == [("0.weight", pytest.approx(4e-10))]
    assert summary["layers_with_healthy_grads"] == [("1.weight", pytest.approx(0.4))]
    assert [name for name, _ in summary["layers_with_exploding_grads"]] == ["2.weight", "3.weight"]


def test_a9_history_is_bounded_and_reset() -> None:
    model = mlp()
    monitor = GradientHealthMonitor(model, enable_detailed_logging=False)
    monitor.check_gradients()
    assert set(monitor.gradient_history) == {"global_norm", "max_norm", "min_norm"}
    assert model[0].bias.grad is not None
    model[0].bias.grad[0] = math.inf
    monitor.check_gradients()
    assert monitor.nan_inf_counts == {"nan": 0, "inf": 1}
    assert (monitor.step_counter, len(monitor.gradient_history["min_norm"])) == (2, 2)
    assert monitor.gradient_history["max_norm"][-1] == math.inf
    monitor.gradient_history["global_norm"].extend(float(i) for i in range(KEPT + 50))
    assert len(monitor.gradient_history["global_norm"]) == KEPT
    monitor.reset_statistics()
    assert (monitor.step_counter, monitor.nan_inf_counts) == (0, {"nan": 0, "inf": 0})
    assert all(len(values) == 0 for values in monitor.gradient_history.values())


def test_a_model_that_keeps_its_monitor_is_copied_and_saved() -> None:
    model = mlp()
    monitor = GradientHealthMonitor(model)
    monitor.check_gradients()
    object.__setattr__(model, "grad_monitor", monitor)
    twin: Any = copy.deepcopy(model)
    assert twin.grad_monitor.model is twin
    loaded: Any = pickle.loads(pickle.dumps(model))
    assert loaded.grad_monitor.step_counter == 1
    assert set(loaded.state_dict()) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_measuring_changes_nothing() -> None:
    model = mlp()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    monitor = GradientHealthMonitor(model)
    monitor.check_gradients()
    monitor.get_gradient_flow_summary()
    assert all(torch.equal(b, p.grad) for b, p in zip(before, model.parameters(), strict=True) if p.grad is not None)
