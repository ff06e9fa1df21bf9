"""Digits: small losses, low precision, extreme scales and inputs, and nothing silent about what is not finite."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.losses import reference
from tests.losses.agree import NAMES, aligned, distance, excluded, gradients, how, rows, scale_for
from trimtab.losses import nway_loss

LOSSES = (3.0, 0.1, 1e-3, 1e-6, 1e-12)
OBJECTIVES = ("axis", "joint", "full")


def errors(
    dtype: torch.dtype, n: int, name: str, objective: str, loss: float, seed: int, **told: Any
) -> tuple[float, float, float]:
    """Relative errors of loss, input gradients and scale gradient on inputs that are exact in ``dtype``."""
    b = {2: 8, 3: 5, 4: 4}[n]
    xs = [x.to(dtype).double().requires_grad_() for x in aligned(n, b, 32, 0.3, seed)]
    scale = torch.tensor(scale_for(loss, xs, name, objective)).double().requires_grad_()
    want = excluded(xs, name, objective, scale, how(name))
    narrow = [x.detach().to(dtype).requires_grad_() for x in xs]
    factor = scale.detach().float().requires_grad_()
    found = nway_loss(narrow, similarity=name, objective=objective, logit_scale=factor, **told)
    theirs = gradients(want, [*xs, scale])
    # As loss scaling does it: a gradient that the type of the inputs cannot hold is no fault of the loss.
    up = 1 / max(float(g.abs().max()) for g in theirs)
    mine = [g.double() / up for g in gradients(found * up, [*narrow, factor])]
    loss_error = abs(float(found.detach().double() - want.detach())) / float(want.detach())
    return loss_error, distance(mine[:-1], theirs[:-1]), distance(mine[-1:], theirs[-1:])


@pytest.mark.parametrize("loss", LOSSES)
@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.sampled_from((2, 3, 4)), st.sampled_from(NAMES), st.sampled_from(OBJECTIVES), st.integers(0, 99))
def test_float32_gradients_at_every_loss(loss: float, n: int, name: str, objective: str, seed: int) -> None:
    assert max(errors(torch.float32, n, name, objective, loss, seed)) < 1e-6


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.sampled_from((2, 3, 4)), st.sampled_from(NAMES), st.sampled_from(OBJECTIVES), st.integers(0, 99))
def test_half_precision_gradients_at_every_loss(
    dtype: torch.dtype, loss: float, n: int, name: str, objective: str, seed: int
) -> None:
    off, gradient, scale = errors(dtype, n, name, objective, loss, seed)
    assert gradient < 3e-2
    assert max(off, scale) < 1e-3


@pytest.mark.parametrize("name", ["mip", "norm", "dist2", "paircos"])
@pytest.mark.parametrize("backend", ["stream", "materialize"])
def test_float32_sums_are_off_by_a_few_roundings_of_the_logits(name: str, backend: str) -> None:
    xs = aligned(3, 5, 32, 0.3, 5)
    for loss in LOSSES:
        found = errors(torch.float32, 3, name, "full", loss, 5, backend=backend, precision="fp32")
        size = reference.logits(xs, name, scale_for(loss, xs, name, "full"), how(name)).abs().max()
        assert max(found) < 1e-6 + 3e-7 * size


@pytest.mark.parametrize("objective", [*OBJECTIVES, "pairwise", "sampled", "sigmoid"])
@pytest.mark.parametrize("name", NAMES)
def test_any_scale_and_any_input_size_is_finite(name: str, objective: str) -> None:
    base = [x.detach().float() for x in rows(3, 4)]
    for size, scale in ((1.0, 1e-4), (1.0, 1e4), (1e-15, 1.0), (1e15, 1e4), (1e-20, 1e4), (1e20, 1e4)):
        xs = [(x * size).requires_grad_() for x in base]
        loss = nway_loss(xs, similarity=name, objective=objective, logit_scale=scale, generator=seeded())
        assert loss.isfinite()
        assert loss >= 0
        grads = torch.autograd.grad(loss, xs)
        assert all(g.isfinite().all() for g in grads)
        if size == 1.0:
            unit = loss
        if size != 1.0 and scale == 1e4:  # rows of any length are the same rows
            torch.testing.assert_close(loss, unit, rtol=1e-4, atol=1e-4)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.mark.parametrize("name", ["norm", "sqnorm", "dist2", "dist"])
def test_large_and_small_rows_as_they_are(name: str) -> None:
    for size, objective in itertools.product((1e-15, 1e15), OBJECTIVES):
        xs = [(x.detach().float() * size).requires_grad_() for x in rows(3, 4)]
        loss = nway_loss(xs, similarity=name, objective=objective, normalize=None)
        assert loss.isfinite()
        assert all(g.isfinite().all() for g in torch.autograd.grad(loss, xs))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_has_the_right_limit_at_extreme_scales(name: str, objective: str) -> None:
    xs = rows(3, 4)
    for scale in (1e-4, 1e4):
        found = nway_loss(xs, similarity=name, objective=objective, logit_scale=scale)
        want = excluded(xs, name, objective, scale, how(name))
        torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
        assert distance(torch.autograd.grad(found, xs), torch.autograd.grad(want, xs)) < 1e-6


@pytest.mark.parametrize("objective", [*OBJECTIVES, "sigmoid"])
@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_zero_modalities_and_antipodes_are_safe(name: str, objective: str) -> None:
    full = [x.detach().float() for x in rows(3, 4)]
    cases = {"zero row": [x.clone() for x in full], "zero modality": [x.clone() for x in full]}
    cases["zero row"][1][2] = 0
    cases["zero modality"][0].zero_()
    cases["all zero"] = [torch.zeros_like(x) for x in full]
    cases["antipodes"] = [full[0], -full[0], full[0].flip(0)]
    cases["sum is zero"] = [full[0], -full[0] / 2, -full[0] / 2]
    for case, normalise in itertools.product(cases, ("auto", None)):
        for precision in ("auto", "fp32"):
            xs = [x.clone().requires_grad_() for x in cases[case]]
            loss = nway_loss(
                xs, similarity=name, objective=objective, normalize=normalise, logit_scale=3.0, precision=precision
            )
            assert loss.isfinite(), case
            grads = torch.autograd.grad(loss, xs)
            assert all(g.isfinite().all() for g in grads), case
            if case == "zero row" and normalise == "auto":
                assert grads[1][2].abs().max() == 0  # it has no direction to move in


@pytest.mark.parametrize("name", NAMES)
def test_equal_logits_give_the_logarithm_of_the_number_of_candidates(name: str) -> None:
    for n, b in ((2, 8), (3, 4), (4, 4)):
        xs = [torch.ones(b, 4, dtype=torch.float64, requires_grad=True) for _ in range(n)]
        for objective, candidates in (("full", b ** (n - 1)), ("axis", b), ("joint", b)):
            loss = nway_loss(xs, similarity=name, objective=objective, logit_scale=7.0)
            assert float(loss.detach()) == pytest.approx(math.log(candidates), rel=1e-14 if name != "volume" else 1e-6)


@pytest.mark.parametrize("objective", [*OBJECTIVES, "pairwise", "sampled", "sigmoid"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_comes_out(objective: str, value: float) -> None:
    for name, normalise in itertools.product(NAMES, ("auto", None)):
        xs = [x.detach() for x in rows(3, 3)]
        xs[1][2, 4] = value
        leaves = [x.clone().requires_grad_() for x in xs]
        loss = nway_loss(leaves, similarity=name, objective=objective, normalize=normalise)
        if normalise == "auto" or math.isnan(value) or name in ("mip", "norm"):
            assert not loss.isfinite(), (name, normalise)
        assert not (loss.isfinite() and loss > 0 and math.isnan(value))


def test_duplicates_are_no_positives() -> None:
    doubled = [torch.cat([x, x[:1]]) for x in aligned(3, 4, 32, 0.1, 0)]
    table = nway_loss(doubled, similarity="norm", objective="full", reduction="none", logit_scale=1e3)
    # Mixtures of a sample and its copy are as good as either: one fourth each.
    torch.testing.assert_close(table[:, 0], torch.full((3,), math.log(4), dtype=torch.float64), rtol=1e-9, atol=0)
    assert (table >= 0).all()


def test_half_precision_does_not_underflow_after_rms() -> None:
    """Products of six entries of unit rows of width 512 vanish in half precision; of rms rows they do not."""
    xs = [x.detach().half().requires_grad_() for x in rows(6, 3, 512)]
    loss = nway_loss(xs, objective="full", logit_scale=1 / 15)
    grads = torch.autograd.grad(loss, xs)
    assert all((g != 0).float().mean() > 0.9 for g in grads)


def test_gradcheck() -> None:
    xs = rows(3, 2, 3)
    for name, objective in itertools.product(NAMES, ("axis", "full")):

        def loss(*leaves: Tensor, name: str = name, objective: str = objective) -> Any:
            return nway_loss(leaves, similarity=name, objective=objective, logit_scale=2.0)

        assert torch.autograd.gradcheck(loss, xs)
