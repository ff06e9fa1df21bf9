"""A23: the six functions have their values and slopes; the table of them holds what was measured."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import trimtab.compat.nn
from trimtab.compat.nn import ImprovedActivations, activation_table, compare_activations

GRID = torch.linspace(-6, 6, 41, dtype=torch.float64)


def by_hand(name: str, x: float) -> float:
    if name == "gelu":
        return x * 0.5 * (1 + math.erf(x / math.sqrt(2)))
    if name == "swish":
        return x / (1 + math.exp(-x))
    if name == "mish":
        return x * math.tanh(math.log1p(math.exp(x)))
    if name == "leaky_relu":
        return x if x > 0 else 0.01 * x
    if name == "elu":
        return x if x > 0 else math.expm1(x)
    return 1.7159 * math.tanh(2 * x / 3)


@pytest.mark.parametrize("name", ["gelu", "swish", "mish", "leaky_relu", "elu", "scaled_tanh"])
def test_a23_values_and_gradients(name: str) -> None:
    function = getattr(ImprovedActivations, name)
    expected = torch.tensor([by_hand(name, float(x)) for x in GRID], dtype=torch.float64)
    assert torch.allclose(function(GRID), expected, rtol=1e-12, atol=1e-12)
    x = (GRID + 0.01).requires_grad_()  # away from the kinks
    assert torch.autograd.gradcheck(function, (x,))
    extreme = torch.tensor([-1e30, -1e4, 0.0, 1e4, 1e30], requires_grad=True)
    out = function(extreme)
    out.sum().backward()
    assert torch.isfinite(out).all()
    assert extreme.grad is not None
    assert torch.isfinite(extreme.grad).all()


def test_a23_parameters_of_the_functions() -> None:
    x = GRID.clone().requires_grad_()
    assert torch.allclose(ImprovedActivations.swish(x, beta=3.0), x * torch.sigmoid(3 * x))
    beta = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    out: Tensor = ImprovedActivations.swish(x, beta)
    out.sum().backward()
    assert beta.grad is not None
    assert torch.allclose(out, ImprovedActivations.swish(x))
    assert torch.equal(ImprovedActivations.leaky_relu(x, 0.2)[0], 0.2 * x[0])
    assert float(ImprovedActivations.elu(x, alpha=2.0)[0].detach()) == pytest.approx(2 * math.expm1(-6))
    assert float(ImprovedActivations.scaled_tanh(x, scale=2.0)[-1].detach()) == pytest.approx(2 * math.tanh(4))


def test_a23_table_holds_what_was_measured() -> None:
    state = torch.get_rng_state()
    rows = {row.name: row for row in compare_activations(depth=12, width=64, num_inputs=128, repeats=1)}
    assert torch.equal(torch.get_rng_state(), state)
    assert set(rows) >= {"GELU", "Swish/SiLU", "Mish", "LeakyReLU", "ReLU", "Tanh"}
    assert (rows["ReLU"].slope_at_zero, rows["ReLU"].slope_at_minus_3) == (0.0, 0.0)
    assert rows["Tanh"].slope_at_zero == 1.0
    assert rows["Tanh"].slope_at_minus_3 == pytest.approx(1 - math.tanh(-3) ** 2, rel=1e-4)
    assert rows["GELU"].slope_at_zero == rows["Swish/SiLU"].slope_at_zero == 0.5
    assert rows["ReLU"].dead_frac > 0.05, "deep plain ReLU networks do have dead units"
    for alive in ("GELU", "Swish/SiLU", "Mish", "LeakyReLU", "ELU"):
        assert rows[alive].dead_frac == 0.0
    assert rows["ReLU"].relative_time == 1.0
    again = {row.name: row for row in compare_activations(depth=12, width=64, num_inputs=128)}
    assert all(again[name].kept_frac == row.kept_frac for name, row in rows.items())
    text = activation_table(again.values())
    assert f"| ReLU | 0 | 0 | {rows['ReLU'].dead_frac:.1%} |" in text
    with pytest.raises(ValueError, match="depth=0"):
        compare_activations(depth=0)


def test_the_public_names_of_nn() -> None:
    for name in trimtab.compat.nn.__all__:
        assert getattr(trimtab.compat.nn, name).__doc__, name
    assert dir(trimtab.compat.nn) == sorted(trimtab.compat.nn.__all__) == trimtab.compat.nn.__all__
    with pytest.raises(AttributeError, match="nonsense"):
        _ = trimtab.compat.nn.nonsense
