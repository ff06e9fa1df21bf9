"""Norms and clipping: equal to torch on finite data, right where torch is not, NaN in, NaN out."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from trimtab.compat.monitors.norm_functions import (
    GradientNorms,
    clip_gradients_by_global_norm,
    compute_global_gradient_norm,
    compute_l2_norm,
    compute_parameter_norm,
    effective_lr,
    gradient_norms,
    gradient_percentiles,
    layer_gradient_scale,
    scale_gradients,
)
from trimtab.core.errors import InputError


def with_gradients(*values: Tensor) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.zeros_like(v)) for v in values]
    for p, v in zip(params, values, strict=True):
        p.grad = v.clone()
    return params


def mlp() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    model(torch.randn(16, 4)).square().mean().backward()
    return model


def as_float64(params: list[nn.Parameter]) -> np.ndarray:
    return np.concatenate([p.grad.detach().double().reshape(-1).numpy() for p in params if p.grad is not None])


# -- C2: the utilities -----------------------------------------------------------------------------------------------


def test_c2_norm_of_a_tensor() -> None:
    x = torch.randn(7, 5)
    assert compute_l2_norm(x) == pytest.approx(float(x.double().norm()), rel=1e-6)
    assert compute_l2_norm(torch.full((10,), 1e20)) == pytest.approx(math.sqrt(10) * 1e20, rel=1e-6)
    assert compute_l2_norm(torch.full((10,), 1e-30)) == pytest.approx(math.sqrt(10) * 1e-30, rel=1e-6)
    assert compute_l2_norm(torch.full((4,), 60000.0, dtype=torch.float16)) == pytest.approx(120000.0, rel=1e-3)
    assert compute_l2_norm(torch.tensor([3.0 + 4.0j])) == pytest.approx(5.0)
    assert math.isnan(compute_l2_norm(torch.tensor([1.0, math.nan])))
    assert compute_l2_norm(torch.tensor([1.0, math.inf])) == math.inf
    assert compute_l2_norm(torch.zeros(0)) == 0.0


def test_c2_global_norm_covers_all_parameters() -> None:
    model = mlp()
    want = np.linalg.norm(as_float64(list(model.parameters())))
    assert compute_global_gradient_norm(model) == pytest.approx(want, rel=1e-6)
    assert compute_global_gradient_norm(model.parameters()) == pytest.approx(want, rel=1e-6)
    assert compute_global_gradient_norm(model.named_parameters()) == pytest.approx(want, rel=1e-6)
    assert compute_global_gradient_norm(nn.Linear(2, 2)) == 0.0, "no gradients"


def test_c2_parameter_norm_is_over_all_parameters_not_the_embedding_alone() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    model[1].weight.requires_grad_(False)
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
    assert compute_parameter_norm(model) == pytest.approx(float(flat.norm()), rel=1e-6)
    tied = nn.Linear(4, 10)
    tied.weight = model[0].weight
    assert compute_parameter_norm(nn.Sequential(model, tied)) == pytest.approx(
        math.hypot(float(flat.norm()), float(tied.bias.detach().norm())), rel=1e-6
    )


def test_c2_scale_gradients_scales_every_one_of_them() -> None:
    params = with_gradients(torch.ones(3), torch.ones(2, 2, dtype=torch.float64), torch.ones(2, dtype=torch.complex64))
    scale_gradients(params, 0.25)
    assert all(bool((p.grad == 0.25).all()) for p in params if p.grad is not None)
    scale_gradients([nn.Parameter(torch.zeros(1))], 2.0)  # nothing to do


def test_c2_gradient_norms_record() -> None:
    params = with_gradients(torch.tensor([1.0, -7.0]), torch.tensor([[2.0, 2.0]]))
    got = gradient_norms(params)
    assert (got.total_norm, got.max_grad, got.mean_grad_abs) == (pytest.approx(math.sqrt(58)), 7.0, 3.0)
    assert gradient_norms(nn.Linear(1, 1)) == GradientNorms(total_norm=0.0, max_grad=0.0, mean_grad_abs=0.0)
    bad = gradient_norms(with_gradients(torch.tensor([1.0, math.nan]), torch.tensor([5.0])))
    assert math.isnan(bad.total_norm)
    assert math.isnan(bad.max_grad)
    assert math.isnan(bad.mean_grad_abs)


def test_things_without_parameters_are_refused() -> None:
    with pytest.raises(InputError, match="entry 0 is a str"):
        compute_global_gradient_norm(["weight"])  # type: ignore[list-item]
    with pytest.raises(InputError, match="max_norm is -1"):
        clip_gradients_by_global_norm(mlp(), max_norm=-1)
    with pytest.raises(InputError, match="max_norm is nan"):
        clip_gradients_by_global_norm(mlp(), max_norm=math.nan)


# -- C3: clipping ----------------------------------------------------------------------------------------------------

elements = st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(
    tensors=st.lists(elements, min_size=1, max_size=4),
    max_norm=st.floats(1e-3, 1e3),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_c3_clipping_equals_torch_and_a_float64_reference(
    tensors: list[list[float]], max_norm: float, dtype: torch.dtype
) -> None:
    values = [torch.tensor(t, dtype=dtype) for t in tensors]
    ours, theirs = with_gradients(*values), with_gradients(*values)
    before = as_float64(ours)
    norm = float(np.linalg.norm(before))
    got = clip_gradients_by_global_norm(ours, max_norm)
    want = nn.utils.clip_grad_norm_(theirs, max_norm)
    close = 1e-6 if dtype is torch.float32 else 1e-12
    assert got == pytest.approx(float(want), rel=close, abs=1e-30)
    np.testing.assert_allclose(as_float64(ours), as_float64(theirs), rtol=close, atol=1e-30)
    expected = before * min(1.0, max_norm / (norm + 1e-6))
    np.testing.assert_allclose(as_float64(ours), expected, rtol=10 * close, atol=1e-30)


def test_c3_default_is_one_and_a_half() -> None:
    params = with_gradients(torch.tensor([3.0, 4.0]))
    assert clip_gradients_by_global_norm(params) == 5.0
    assert compute_global_gradient_norm(params) == pytest.approx(1.5, rel=1e-5)
    assert clip_gradients_by_global_norm(params) == pytest.approx(1.5, rel=1e-5), "and then there is nothing to clip"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c3_huge_finite_gradients_are_clipped_not_zeroed(dtype: torch.dtype) -> None:
    params = with_gradients(torch.full((4,), 1e20, dtype=dtype), torch.full((5,), -1e20, dtype=dtype))
    assert clip_gradients_by_global_norm(params, 1.0) == pytest.approx(3e20, rel=1e-2)
    np.testing.assert_allclose(as_float64(params), [1 / 3] * 4 + [-1 / 3] * 5, rtol=1e-2)
    params = with_gradients(torch.full((4,), 1e38))
    clip_gradients_by_global_norm(params, 1.0)
    np.testing.assert_allclose(as_float64(params), [0.5] * 4, rtol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_c3_a_bad_gradient_is_not_spread(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    params = with_gradients(torch.tensor([1.0, bad]), torch.tensor([50.0]))
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        norm = clip_gradients_by_global_norm(params, 1.0)
    assert not math.isfinite(norm)
    assert math.isnan(norm) == math.isnan(bad)
    assert torch.equal(params[1].grad, torch.tensor([50.0]))  # type: ignore[arg-type]
    assert "not clipped" in caplog.text


def test_c3_sparse_and_half_precision_gradients() -> None:
    indices = torch.tensor([[1, 1, 3]])
    sparse = torch.sparse_coo_tensor(indices, torch.tensor([[3.0], [4.0], [0.0]]), (5, 1), check_invariants=True)
    table = nn.Parameter(torch.zeros(5, 1))
    table.grad = sparse
    assert clip_gradients_by_global_norm([table], 1.0) == pytest.approx(7.0)
    assert table.grad is not None
    assert float(table.grad.to_dense().norm()) == pytest.approx(1.0, rel=1e-5)
    half = with_gradients(torch.full((64,), 60000.0, dtype=torch.float16))
    assert clip_gradients_by_global_norm(half, 8.0) == pytest.approx(480000.0, rel=1e-3)
    np.testing.assert_allclose(as_float64(half), [1.0] * 64, rtol=1e-3)


# -- C15: the later tools --------------------------------------------------------------------------------------------


def test_c15_percentiles_of_elements() -> None:
    params = with_gradients(torch.arange(-50.0, 0.0), torch.arange(0.0, 51.0).reshape(3, 17))
    sizes = np.abs(np.arange(-50.0, 51.0))
    want = np.percentile(sizes, [10, 50, 90, 99])
    got = gradient_percentiles(params)
    assert list(got) == ["p10", "p50", "p90", "p99"]
    np.testing.assert_allclose(list(got.values()), want, rtol=1e-6)
    assert gradient_percentiles(params, q=(2.5,)) == {"p2.5": pytest.approx(np.percentile(sizes, 2.5))}
    assert gradient_percentiles(nn.Linear(1, 1)) == {}
    assert all(math.isnan(v) for v in gradient_percentiles(with_gradients(torch.tensor([1.0, math.nan]))).values())
    with pytest.raises(InputError, match="between 0 and 100"):
        gradient_percentiles(params, q=(101,))


def test_c15_percentiles_of_large_models_are_an_even_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.compat.monitors import norm_functions as norms

    monkeypatch.setattr(norms, "MOST_SORTED", 1000)
    params = with_gradients(torch.linspace(0, 1, 100_000))
    assert gradient_percentiles(params)["p90"] == pytest.approx(0.9, abs=0.01)


def test_c15_layer_scale_relative_to_the_output() -> None:
    weights = {"first": 1e-5, "middle": 0.5, "loud": 1e3, "head": 1.0}
    named = [(n, nn.Parameter(torch.zeros(4, 4))) for n in weights]
    for name, p in named:
        p.grad = torch.full((4, 4), weights[name])
    bias = nn.Parameter(torch.zeros(4))
    bias.grad = torch.full((4,), 1e9)
    got = layer_gradient_scale([*named, ("bias", bias)])
    assert {n: s.state for n, s in got.items()} == {
        "first": "vanishing",
        "middle": "healthy",
        "loud": "exploding",
        "head": "healthy",
    }
    assert got["first"].scale == pytest.approx(1e-5)
    assert layer_gradient_scale(named, output="loud")["middle"].state == "vanishing"
    assert layer_gradient_scale(nn.Linear(2, 2)) == {}
    with pytest.raises(InputError, match="no parameter named 'tail'"):
        layer_gradient_scale(named, output="tail")


def test_c15_layer_scale_finds_a_deep_sigmoid_network() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(16, 16), nn.Sigmoid())]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    model(torch.randn(32, 16)).square().mean().backward()
    got = layer_gradient_scale(model)
    assert got["0.weight"].state == "vanishing"
    assert got["16.weight"].scale == 1.0


def test_c15_effective_learning_rate_of_chronic_clipping() -> None:
    assert effective_lr(1e-3, clip=1.0, norm=50.0) == pytest.approx(2e-5)
    assert effective_lr(1e-3, clip=1.0, norm=0.2) == 1e-3
    assert effective_lr(1e-3, clip=1.0, norm=0.0) == 1e-3
    assert effective_lr(1e-3, clip=1.0, norm=math.inf) == 0.0
    assert math.isnan(effective_lr(1e-3, clip=1.0, norm=math.nan))
    # The claim itself: an SGD step with clipping is a step with this learning rate without.
    a, b = with_gradients(torch.tensor([30.0, 40.0])), with_gradients(torch.tensor([30.0, 40.0]))
    norm = clip_gradients_by_global_norm(a, 2.0)
    torch.optim.SGD(a, lr=0.1).step()
    torch.optim.SGD(b, lr=effective_lr(0.1, clip=2.0, norm=norm)).step()
    assert torch.allclose(a[0], b[0])


@pytest.mark.filterwarnings("ignore")  # torch.distributed warns about its own set-up
def test_c3_sharded_gradients_are_clipped_by_the_norm_of_all_shards(tmp_path: Path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        weight = nn.Parameter(distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)]))
        weight.grad = distribute_tensor(torch.full((4, 2), 10.0), mesh, [Shard(0)])
        assert clip_gradients_by_global_norm([weight], 2.0) == pytest.approx(10.0 * math.sqrt(8), rel=1e-6)
        assert float(weight.grad.full_tensor().norm()) == pytest.approx(2.0, rel=1e-5)  # type: ignore[attr-defined]
        assert gradient_norms([weight]).total_norm == pytest.approx(2.0, rel=1e-5)
        scale_gradients([weight], 0.5)
        assert compute_global_gradient_norm([weight]) == pytest.approx(1.0, rel=1e-5)
    finally:
        dist.destroy_process_group()
