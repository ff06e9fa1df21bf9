"""Random negatives: which they are, and that the loss is the softmax over exactly those."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.losses import reference
from tests.losses.agree import NAMES, distance, gradients, how, rows
from trimtab.losses import nway_loss
from trimtab.losses.backends.sampled import draw_permutations


def by_hand(
    xs: list[Tensor], name: str, scale: Tensor, order: Tensor, present: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """The mean loss, each candidate looked up among all logits."""
    n, b = len(xs), xs[0].shape[0]
    z = reference.logits(xs, name, scale, how(name))
    terms = []
    for m in range(n):
        for i in range(b):
            if present is not None and not present[:, i].all():
                continue
            candidates = [(i,) * n]
            for sets in order[:, m]:
                for j in range(b):
                    t = tuple(i if k == m else int(sets[k, j]) for k in range(n))
                    there = present is None or all(present[k, t[k]] for k in range(n))
                    if j != i and t != (i,) * n and there:
                        candidates.append(t)
            logits = torch.stack([z[t] for t in candidates])
            terms.append(logits.logsumexp(0) - (1 - smoothing) * logits[0] - smoothing * logits.mean())
    return torch.stack(terms).mean()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", [1, 3])
def test_the_softmax_is_over_the_drawn_tuples(name: str, count: int) -> None:
    for n, b in ((2, 4), (3, 5), (4, 3)):
        xs = rows(n, b)
        scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        out = nway_loss(
            xs, similarity=name, objective="sampled", logit_scale=scale, num_samples=count, details=True, chunk=7
        )
        assert out.permutations is not None
        assert out.permutations.shape == (count, n, n, b)
        want = by_hand(xs, name, scale, out.permutations)
        torch.testing.assert_close(out.loss, want, rtol=1e-9, atol=1e-12)
        assert distance(gradients(out.loss, [*xs, scale]), gradients(want, [*xs, scale])) < 1e-9


def test_smoothing_and_masks() -> None:
    xs, scale = rows(3, 5), torch.tensor(1.3, dtype=torch.float64)
    mask = torch.rand(3, 5, generator=torch.Generator().manual_seed(2)) < 0.8
    assert 0 < mask.all(0).sum() < 5
    for present in (None, mask):
        out = nway_loss(
            xs,
            similarity="norm",
            objective="sampled",
            logit_scale=scale,
            num_samples=4,
            mask=present,
            label_smoothing=0.2,
            details=True,
        )
        assert out.permutations is not None
        torch.testing.assert_close(out.loss, by_hand(xs, "norm", scale, out.permutations, present, 0.2))


def test_draws_are_permutations_of_the_others_only_and_follow_the_generator() -> None:
    order = draw_permutations(3, 6, 2, torch.Generator().manual_seed(0))
    assert torch.equal(order.sort(-1).values, torch.arange(6).expand(2, 3, 3, 6))
    for m in range(3):
        assert torch.equal(order[:, m, m], torch.arange(6).expand(2, 6))
    again = draw_permutations(3, 6, 2, torch.Generator().manual_seed(0))
    assert torch.equal(order, again)
    xs = rows(3, 6)
    one, two = (nway_loss(xs, objective="sampled", generator=torch.Generator().manual_seed(4)) for _ in range(2))
    assert torch.equal(one, two)
    state = torch.random.get_rng_state()
    nway_loss(xs, objective="sampled", generator=torch.Generator().manual_seed(4))
    assert torch.equal(state, torch.random.get_rng_state())


def test_the_mean_of_exp_is_unbiased_for_that_over_all_negatives() -> None:
    xs = [x.detach() for x in rows(3, 4)]
    count = 2000
    out = nway_loss(
        xs,
        similarity="norm",
        objective="sampled",
        logit_scale=2.0,
        num_samples=count,
        details=True,
        generator=torch.Generator().manual_seed(0),
    )
    full = nway_loss(xs, similarity="norm", objective="full", logit_scale=2.0, details=True)
    assert out.negatives is not None
    assert full.negatives is not None
    kept = count * 3 * 15 / 16  # three columns a set, of which one in 16 is the positive
    ratio = (out.negatives.exp() / kept) / (full.negatives.exp() / 15)
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.05, atol=0)
