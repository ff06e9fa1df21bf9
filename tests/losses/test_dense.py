"""The lines: tiles that are forgotten and computed again change nothing but the memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.losses.agree import NAMES, distance, gradients, rows
from tests.losses.largest import Largest
from trimtab.losses import nway_loss
from trimtab.losses.backends.dense import reduce_lines
from trimtab.losses.problem import make_problem


@pytest.mark.parametrize("objective", ["axis", "joint"])
@pytest.mark.parametrize("name", NAMES)
def test_tiles_change_nothing(name: str, objective: str) -> None:
    xs = rows(3, 7)
    scale = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    inputs = [*xs, scale]
    loss = partial(nway_loss, xs, similarity=name, objective=objective, logit_scale=scale, label_smoothing=0.1)
    whole = loss()
    theirs = gradients(whole, inputs)
    for chunk in (1, 10, 21):
        part = loss(chunk=chunk)
        torch.testing.assert_close(part, whole, rtol=1e-12, atol=1e-12)
        assert distance(gradients(part, inputs), theirs) < 1e-12


def test_bias_has_its_gradient_through_tiles() -> None:
    xs = rows(2, 6)
    bias = torch.tensor(-1.0, dtype=torch.float64, requires_grad=True)
    whole, part = (
        torch.autograd.grad(nway_loss(xs, objective="sigmoid", logit_bias=bias, backend="dense", chunk=c), bias)[0]
        for c in (None, 6)
    )
    torch.testing.assert_close(part, whole)


def test_tiles_keep_memory_small() -> None:
    xs = rows(3, 200, 4)
    with Largest() as largest:
        nway_loss(xs, objective="axis", chunk=1000).backward()
    assert largest.numel <= 3 * 200 * 4  # the inputs
    with Largest() as largest:
        nway_loss(xs, objective="axis").backward()
    assert largest.numel >= 200**2


def test_inputs_without_gradient_stay_without_through_tiles() -> None:
    xs = rows(3, 5)
    some = [xs[0], xs[1].detach(), xs[2].detach()]
    loss = nway_loss(some, objective="joint", chunk=5)
    loss.backward()
    assert xs[0].grad is not None
    assert some[1].grad is None
    assert not nway_loss([x.detach() for x in xs], objective="joint", chunk=5).requires_grad


@pytest.mark.parametrize("kind", ["lse", "sum", "softplus"])
def test_shares_are_anchors(kind: str) -> None:
    problem = make_problem(rows(3, 5), "norm", chunk=7)
    whole = reduce_lines(problem, kind, "axis")  # type: ignore[arg-type]
    for parts in (2, 7):
        pieces = [reduce_lines(replace(problem, share=(k, parts)), kind, "axis") for k in range(parts)]  # type: ignore[arg-type]
        stacked = torch.stack(pieces)
        total = stacked.logsumexp(0) if kind == "lse" else stacked.sum(0)
        torch.testing.assert_close(total, whole)
