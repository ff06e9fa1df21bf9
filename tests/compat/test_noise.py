"""A17: noise on gradients is drawn where asked, fades as promised, and keeps off what it must not touch."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from trimtab.compat.nn import add_gradient_noise
from trimtab.compat.nn.layers import _STEPS


def with_gradients(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(100, 100)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    return model


def test_a17_noise_fades_with_the_steps() -> None:
    model = with_gradients()
    for t in range(4):
        model.weight.grad = torch.zeros_like(model.weight)
        std = add_gradient_noise(model, noise_std=0.1, gamma=0.55)
        assert std == pytest.approx(0.1 / (1 + t) ** 0.55)
        assert float(model.weight.grad.std()) == pytest.approx(std, rel=0.05)
        assert abs(float(model.weight.grad.mean())) < std * 0.05
    other = with_gradients()
    assert add_gradient_noise(other, noise_std=0.1) == 0.1, "every model counts its own steps"
    assert add_gradient_noise(model, noise_std=0.1, gamma=1.0, step=99) == pytest.approx(1e-3)
    assert add_gradient_noise(model, noise_std=0.1, gamma=1.0) == pytest.approx(0.1 / 101)
    assert add_gradient_noise(model, noise_std=0.1, gamma=0.0) == 0.1


def test_a17_noise_is_added_and_leaves_what_it_must() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "frozen": nn.Linear(4, 4), "e": nn.Embedding(9, 4, sparse=True)})
    model["frozen"].requires_grad_(False)
    model["frozen"].weight.grad = torch.ones(4, 4)
    (model["a"](torch.ones(1, 4)) + model["e"](torch.tensor([1]))).sum().backward()
    sparse = model["e"].weight.grad.to_dense()
    before = model["a"].weight.grad.clone()
    model["a"].bias.grad = None
    add_gradient_noise(model, noise_std=1e-3)
    moved = (model["a"].weight.grad - before).abs()
    assert 0 < float(moved.max()) < 1e-2
    assert torch.equal(model["frozen"].weight.grad, torch.ones(4, 4))
    assert torch.equal(model["e"].weight.grad.to_dense(), sparse)
    assert model["a"].bias.grad is None


def test_a17_a_generator_leaves_the_global_random_state_alone() -> None:
    grads = []
    for _ in range(2):
        model = with_gradients()
        state = torch.get_rng_state()
        add_gradient_noise(model, 0.1, generator=torch.Generator().manual_seed(3))
        assert torch.equal(torch.get_rng_state(), state)
        grads.append(model.weight.grad)
    assert torch.equal(grads[0], grads[1])
    state = torch.get_rng_state()
    add_gradient_noise(with_gradients(), 0.0)
    assert with_gradients().weight.grad is not None
    quiet = with_gradients(1.0)
    add_gradient_noise(quiet, 0.0)
    assert torch.equal(quiet.weight.grad, torch.ones(100, 100))


def test_a17_counters_die_with_their_models() -> None:
    gc.collect()
    before = len(_STEPS)
    model = with_gradients()
    add_gradient_noise(model)
    assert len(_STEPS) == before + 1
    del model
    gc.collect()
    assert len(_STEPS) == before


@pytest.mark.parametrize("bad", [{"noise_std": -1.0}, {"noise_std": float("nan")}, {"gamma": -0.1}, {"step": -1}])
def test_a17_wrong_settings_are_named(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        add_gradient_noise(with_gradients(), **bad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a17_low_precision_gradients_stay_what_they_are(dtype: torch.dtype) -> None:
    model = with_gradients().to(dtype)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    add_gradient_noise(model, 1e-2, generator=torch.Generator().manual_seed(0))
    assert model.weight.grad.dtype == dtype
    assert float(model.weight.grad.float().std()) == pytest.approx(1e-2, rel=0.05)
