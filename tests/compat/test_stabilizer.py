"""A24: each of the four methods acts, holds the scale it promises, and says what it does not know."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from trimtab.compat.nn import GradientStabilizer, stabilize_layer


@pytest.mark.parametrize("method", ["layer_norm", "batch_norm"])
def test_a24_normalisation_holds_the_scale(method: str) -> None:
    layer = GradientStabilizer(method, hidden_dim=8)
    x = (torch.randn(5, 7, 8) * 1e4 + 3e4).requires_grad_()
    out = layer(x)
    dims = (-1,) if method == "layer_norm" else (0, 1)
    assert out.shape == x.shape
    assert torch.allclose(out.mean(dims), torch.zeros(()), atol=1e-3)
    assert torch.allclose(out.std(dims, correction=0), torch.ones(()), atol=1e-3)
    (out * torch.randn_like(out)).sum().backward()
    assert x.grad is not None
    assert float(x.grad.norm()) < 1.0, "an input 1e4 times as large gets a gradient so much smaller"


def test_a24_batch_norm_of_one_row_and_its_momentum() -> None:
    layer = GradientStabilizer("batch_norm", hidden_dim=3, momentum=0.5)
    layer(torch.randn(64, 3) + 4.0)
    assert torch.allclose(layer.layer.running_mean, torch.full((3,), 2.0), atol=0.3)
    mean = layer.layer.running_mean.clone()
    one = torch.randn(1, 3, requires_grad=True)
    trained = layer(one)
    trained.sum().backward()
    assert torch.equal(layer.layer.running_mean, mean)
    assert torch.equal(trained, layer.eval()(one))


def test_a24_spectral_norm_really_bounds() -> None:
    layer = GradientStabilizer("spectral_norm", hidden_dim=6)
    x = torch.randn(4, 6)
    assert torch.allclose(layer(x), x, atol=1e-5), "the identity at first"
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    for _ in range(30):
        optimizer.zero_grad()
        (-layer(x).square().sum()).backward()  # rewards growth
        optimizer.step()
    raw = layer.layer.parametrizations.weight.original.detach()
    assert float(torch.linalg.matrix_norm(layer.layer.weight.detach(), 2)) < 1.1
    assert not torch.allclose(raw, torch.eye(6)), "it has learned"
    sent = x.clone().requires_grad_()
    layer(sent).backward(torch.ones(4, 6))
    assert float(sent.grad.norm()) <= 1.1 * 24**0.5


def test_a24_weight_norm_really_acts() -> None:
    layer = GradientStabilizer("weight_norm", hidden_dim=6)
    x = torch.randn(4, 6)
    assert torch.allclose(layer(x), x, atol=1e-6)
    lengths, directions = layer.layer.parametrizations.weight.original0, layer.layer.parametrizations.weight.original1
    with torch.no_grad():
        lengths.mul_(3.0)
        directions.mul_(100.0)  # a length of its own: that of the direction means nothing
    assert torch.allclose(layer(x), 3 * x, atol=1e-5)
    layer(x).square().sum().backward()
    along = (directions.grad * directions).sum(1)
    assert torch.allclose(along, torch.zeros(6), atol=1e-4), "no gradient along the direction itself"


def test_a24_weight_norm_of_a_layer_keeps_its_output_and_revives_zero_rows() -> None:
    plain = nn.Conv2d(3, 4, 3)
    with torch.no_grad():
        plain.weight[1].zero_()
    layer = stabilize_layer(copy.deepcopy(plain), "weight_norm")
    x = torch.randn(2, 3, 5, 5)
    assert torch.allclose(layer(x), plain(x), atol=1e-6)
    layer(x).square().sum().backward()
    for parameter in layer.parameters():
        assert torch.isfinite(parameter.grad).all()
    assert float(layer.parametrizations.weight.original0.grad[1].abs()) > 0


def test_a24_what_it_does_not_know_is_said() -> None:
    with pytest.raises(ValueError, match=r"'group_norm'.*layer_norm, batch_norm, weight_norm, spectral_norm"):
        GradientStabilizer("group_norm", hidden_dim=4)
    with pytest.raises(ValueError, match="hidden_dim is None"):
        GradientStabilizer("layer_norm")
    with pytest.raises(ValueError, match=r"\(2, 3\).*\[..., 4\]"):
        GradientStabilizer("batch_norm", hidden_dim=4)(torch.ones(2, 3))
    with pytest.raises(ValueError, match="weight_norm, spectral_norm"):
        stabilize_layer(nn.Linear(2, 2), "layer_norm")
    with pytest.raises(ValueError, match="GELU has no weight"):
        stabilize_layer(nn.GELU(), "weight_norm")
    with pytest.raises(ValueError, match="parametrised already"):
        stabilize_layer(stabilize_layer(nn.Linear(2, 2), "weight_norm"), "spectral_norm")
    zero = nn.Linear(2, 2)
    nn.init.zeros_(zero.weight)
    with pytest.raises(ValueError, match="zeros alone"):
        stabilize_layer(zero, "spectral_norm")
