"""Absent entries: the loss is that of the tuples that exist, whatever stands in the place of the rest."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.losses import reference
from tests.losses.agree import NAMES, distance, gradients, how, rows
from trimtab.losses import nway_loss
from trimtab.losses.cost import BACKENDS, can

MASK = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]], dtype=torch.bool)  # samples 0 and 1 are whole


def by_definition(xs: list[Tensor], name: str, objective: str, scale: Tensor, smoothing: float = 0.0) -> Tensor:
    """The mean over the anchors of whole samples, tuple by tuple."""
    n, b = len(xs), xs[0].shape[0]
    z = reference.logits(xs, name, scale, how(name))
    terms = []
    for m, i in itertools.product(range(n), range(b)):
        if not MASK[:, i].all():
            continue
        candidates = [
            t
            for t in itertools.product(range(b), repeat=n)
            if all(MASK[k, t[k]] for k in range(n))
            and (t[m] == i if objective != "axis" else all(t[k] == i for k in range(n) if k != m))
            and (objective != "joint" or len({t[k] for k in range(n) if k != m}) == 1)
        ]
        logits = torch.stack([z[t] for t in candidates])
        positive = z[(i,) * n]
        terms.append(logits.logsumexp(0) - (1 - smoothing) * positive - smoothing * logits.mean())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("objective", ["axis", "joint", "full"])
@pytest.mark.parametrize("name", NAMES)
def test_only_tuples_that_exist_count(name: str, objective: str) -> None:
    xs = rows(3, 4)
    scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    for smoothing in (0.0, 0.1):
        want = by_definition(xs, name, objective, scale, smoothing)
        theirs = gradients(want, [*xs, scale])
        for backend in BACKENDS:
            if backend == "triton" or not can(backend, name, objective, 3):
                continue
            told: dict[str, Any] = {"backend": backend, "label_smoothing": smoothing, "logit_scale": scale}
            found = nway_loss(xs, similarity=name, objective=objective, mask=MASK, **told)
            torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
            assert distance(gradients(found, [*xs, scale]), theirs) < 1e-9


@pytest.mark.parametrize("objective", ["axis", "joint", "full", "pairwise", "sampled", "sigmoid"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_absent_is_never_looked_at(name: str, objective: str) -> None:
    clean = rows(3, 4)
    filled = [x.detach().clone() for x in clean]
    for m, i in (~MASK).nonzero().tolist():
        filled[m][i] = math.nan
    filled = [x.requires_grad_() for x in filled]
    found, want = (
        nway_loss(xs, similarity=name, objective=objective, mask=MASK, generator=torch.Generator().manual_seed(1))
        for xs in (filled, clean)
    )
    torch.testing.assert_close(found, want)
    for x, grad, present in zip(filled, gradients(found, filled), MASK, strict=True):
        assert grad.shape == x.shape
        assert grad.isfinite().all()
        assert grad[~present].abs().sum() == 0
        assert grad[present].abs().sum() > 0


@pytest.mark.parametrize("objective", ["axis", "joint", "full", "pairwise", "sampled", "sigmoid"])
def test_without_a_whole_sample_the_loss_is_a_zero_with_a_graph(objective: str) -> None:
    mask = torch.tensor([[True, False], [False, True]])
    xs = rows(2, 2)
    loss = nway_loss(xs, objective=objective, mask=mask)
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, xs))


def test_pairs_use_what_both_have() -> None:
    xs = rows(3, 4)
    told: dict[str, Any] = {"similarity": "norm", "logit_scale": 2.0}
    total = torch.zeros((), dtype=torch.float64)
    for m, k in itertools.combinations(range(3), 2):
        both = MASK[m] & MASK[k]
        # As candidate, an entry counts even where its partner is absent.
        part = nway_loss([xs[m], xs[k]], objective="full", mask=MASK[[m, k]], reduction="none", **told)
        total = total + part[:, both].mean()
        assert part[:, ~both].abs().max() == 0
    torch.testing.assert_close(nway_loss(xs, objective="pairwise", mask=MASK, **told), total)


def test_a_mask_of_ones_changes_nothing() -> None:
    xs = rows(3, 4)
    for objective in ("axis", "joint", "full", "pairwise", "sigmoid"):
        want = nway_loss(xs, objective=objective)
        torch.testing.assert_close(nway_loss(xs, objective=objective, mask=torch.ones(3, 4, dtype=torch.bool)), want)


def test_sigmoid_sums_over_the_tuples_of_whole_anchors() -> None:
    xs = rows(3, 4)
    z = reference.logits(xs, "mip", 1.0, "rms") - 0.5
    total = torch.zeros((), dtype=torch.float64)
    for m, i in itertools.product(range(3), (0, 1)):
        for t in itertools.product(range(4), repeat=3):
            if t[m] == i and all(MASK[k, t[k]] for k in range(3)):
                sign = -1 if t == (i, i, i) else 1
                total = total + torch.nn.functional.softplus(sign * z[t])
    torch.testing.assert_close(nway_loss(xs, objective="sigmoid", logit_bias=-0.5, mask=MASK), total / 6)
