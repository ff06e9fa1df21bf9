"""What answers were compared with, read off the gradient: against what was really given to the loss."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.sample.loops import attached
from trimtab.sample.probes.answers import by_classes, by_sure_ones, by_values, by_yes_and_no


def with_gradient(answers: Tensor, loss: Any) -> tuple[Any, Any, float]:
    leaf = answers.clone().requires_grad_()
    value = loss(leaf)
    value.backward()
    assert leaf.grad is not None
    return leaf.detach().double().numpy(), leaf.grad.double().numpy(), float(value.detach())


def test_labels_and_loss_of_a_cross_entropy() -> None:
    source = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 7, (40,), generator=source)
    labels[3] = -100
    logits = torch.randn(40, 7, generator=source)
    for sign, scale in ((1.0, 1.0), (1.0, 0.25), (-1.0, 1.0)):
        rows, grad, loss = with_gradient(logits, lambda z: sign * scale * functional.cross_entropy(z, labels))  # noqa: B023
        found = by_classes(rows, grad, upwards=sign < 0)
        assert found is not None
        assert found.labels is not None
        assert found.labels.tolist() == labels[labels >= 0].tolist()
        assert found.loss == pytest.approx(sign * loss / scale, rel=1e-5)
        assert found.blind == pytest.approx(math.log(7))
        assert not found.are_shares


def test_probabilities_are_no_logits() -> None:
    shares = torch.randn(16, 5).softmax(1)
    rows, grad, _ = with_gradient(shares, lambda z: functional.cross_entropy(z, torch.arange(16) % 5))
    found = by_classes(rows, grad, upwards=False)
    assert found is not None
    assert found.are_shares
    yes = torch.rand(128)
    rows, grad, _ = with_gradient(yes, lambda z: functional.binary_cross_entropy_with_logits(z, (z > 0.5).float()))
    found = by_yes_and_no(rows, grad, factor=1.0)
    assert found is not None
    assert found.are_shares


def test_yes_and_no_are_told_and_soft_targets_are_left() -> None:
    targets = (torch.rand(6, 20) > 0.7).float()
    logits = torch.randn(6, 20)
    rows, grad, loss = with_gradient(logits, lambda z: 0.5 * functional.binary_cross_entropy_with_logits(z, targets))
    found = by_yes_and_no(rows, grad, factor=0.5)
    assert found is not None
    assert found.values is not None
    assert np.array_equal(found.values, targets.numpy())
    assert found.loss == pytest.approx(2 * loss, rel=1e-5)
    assert not found.are_shares
    assert by_yes_and_no(rows, grad, factor=1.0) is None
    soft = torch.rand(6, 20)
    rows, grad, _ = with_gradient(logits, lambda z: functional.binary_cross_entropy_with_logits(z, soft))
    assert by_yes_and_no(rows, grad, factor=1.0) is None


def test_values_are_told_where_the_loss_is_the_mean_of_their_squares() -> None:
    targets, answers = torch.randn(8, 3), torch.randn(8, 3)
    rows, grad, loss = with_gradient(answers, lambda z: functional.mse_loss(z, targets))
    found = by_values(rows, grad, loss)
    assert found is not None
    assert found.values == pytest.approx(targets.double().numpy(), abs=1e-5)
    assert by_values(rows, grad, 2 * loss) is None
    assert by_values(rows, grad * math.nan, loss) is None


@pytest.mark.parametrize("kind", ["nll", "mse"])
def test_chance_is_known_without_telling_targets(kind: str) -> None:
    """Nine of ten answers are of one class, or spread by 2 around 5: both are seen by the gradients alone."""
    torch.manual_seed(0)
    net = nn.Linear(6, 4 if kind == "nll" else 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    with attached(net, optimizer) as (guard, kept):
        for _ in range(200):
            x = torch.randn(64, 6)
            if kind == "nll":
                y = torch.where(torch.rand(64) < 0.9, 0, torch.randint(0, 4, (64,)))
                loss = functional.cross_entropy(net(x), y)
            else:
                loss = functional.mse_loss(net(x), 5.0 + 2.0 * torch.randn(64, 1))
            loss.backward()
            guard.observe(loss=loss)
            optimizer.step()
            optimizer.zero_grad()
    chance = [v for v in kept.all("chance") if v is not None][-1]
    shares = (0.925, 0.025, 0.025, 0.025)
    want = -sum(p * math.log(p) for p in shares) if kind == "nll" else 4.0
    assert chance == pytest.approx(want, rel=0.15)


@pytest.mark.parametrize("num", [8, 33])
def test_answers_that_are_compared_with_every_target_are_drawn_to_one(num: int) -> None:
    answers = torch.randn(num, 1, dtype=torch.float64, requires_grad=True)
    targets = torch.randn(num, dtype=torch.float64)
    loss = (answers - targets).square().mean()
    (grad,) = torch.autograd.grad(loss, answers)
    found = by_values(answers.detach().numpy(), grad.numpy(), loss.item())
    assert found is not None
    assert found.values is None
    assert found.one_target == pytest.approx(float(targets.mean()))


def test_targets_that_are_all_the_same_make_no_guess_blind() -> None:
    """Of an adversarial loss one forward has only ones: that others are better at it says nothing."""
    logits = torch.randn(16, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.ones(16, dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss, logits)
    found = by_yes_and_no(logits.detach().numpy(), grad.numpy(), factor=1.0)
    assert found is not None
    assert math.isnan(found.blind)


@pytest.mark.parametrize("side", [0.0, 1.0])
def test_sure_answers_tell_their_side(side: float) -> None:
    logits = (torch.rand(16, dtype=torch.float64) + 5.0) * (1.0 if side else -1.0)
    logits.requires_grad_()
    loss = functional.binary_cross_entropy_with_logits(logits, torch.full((16,), side, dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss, logits)
    found = by_sure_ones(logits.detach().numpy(), grad.numpy())
    assert found is not None
    assert (found.side, found.loss) == (side, pytest.approx(loss.item()))
    assert by_sure_ones(logits.detach().numpy(), -grad.numpy()) is None, "sure and wrong"
