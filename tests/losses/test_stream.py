"""The tiles give what all logits at once give: any tile, any share, any cotangent, never all logits in memory."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.losses.agree import distance, rows
from tests.losses.largest import Largest
from tests.losses.negatives import compare, cotangent, gradients, inputs
from trimtab.losses import nway_loss
from trimtab.losses.backends import stream
from trimtab.losses.problem import Kind, Problem, make_problem
from trimtab.losses.tuple_reduction import share_of

NAMES = ("mip", "norm", "sqnorm", "dist2")  # paircos needs unit rows, which the definition makes itself: see below
KINDS: tuple[Kind, ...] = ("lse", "sum", "softplus")


def prepared(n: int, b: int, name: str, **told: object) -> Problem:
    xs = inputs(n, b, 6)
    return make_problem(xs, name, logit_scale=2.0, logit_bias=-0.5, **told)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_backend_as_the_seam_demands(name: str, kind: Kind) -> None:
    for n, b, chunk in ((2, 7, 5), (3, 5, None), (3, 5, 11), (4, 3, 1), (5, 3, 64), (6, 2, 7)):
        compare(stream.reduce_tuples, inputs(n, b, 6), name, kind, chunk=chunk)
    present = torch.tensor([[1, 0, 1], [1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    compare(stream.reduce_tuples, inputs(3, 3, 6), name, kind, present=present, chunk=4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["mip", "norm"])
def test_shares_add_up(name: str, kind: Kind) -> None:
    for n, b, parts in ((3, 4, 3), (4, 2, 7), (2, 3, 2)):
        problem = prepared(n, b, name, chunk=5)
        leaves = [*problem.xs]
        whole = stream.reduce_tuples(problem, kind)
        pieces = torch.stack([stream.reduce_tuples(replace(problem, share=(k, parts)), kind) for k in range(parts)])
        total = pieces.logsumexp(0) if kind == "lse" else pieces.sum(0)
        torch.testing.assert_close(total, whole)
        g = cotangent(n, b)
        weight = torch.autograd.grad((total * g).sum(), pieces, retain_graph=True)[0]
        parts_grad = [gradients(piece, w, leaves) for piece, w in zip(pieces, weight, strict=True)]
        summed = [torch.stack(list(column)).sum(0) for column in zip(*parts_grad, strict=True)]
        assert distance(summed, gradients(whole, g, leaves)) < 1e-9


def test_shares_are_a_near_equal_partition() -> None:
    for count, parts in ((10, 3), (2, 5), (7, 7)):
        cuts = [share_of(count, (k, parts)) for k in range(parts)]
        assert [i for a, b in cuts for i in range(a, b)] == list(range(count))
        assert max(b - a for a, b in cuts) - min(b - a for a, b in cuts) <= 1


def test_paircos_and_masks_through_the_loss() -> None:
    xs = rows(4, 3)
    mask = torch.rand(4, 3, generator=torch.Generator().manual_seed(1)) < 0.85
    for present in (None, mask):
        found, want = (
            nway_loss(xs, similarity="paircos", objective="full", logit_scale=5.0, mask=present, backend=b, chunk=4)
            for b in ("stream", "materialize")
        )
        torch.testing.assert_close(found, want)
        assert distance(torch.autograd.grad(found, xs), torch.autograd.grad(want, xs)) < 1e-9


def test_never_all_logits_in_memory() -> None:
    xs = [x.detach().float().requires_grad_() for x in rows(4, 12, 8)]
    told = {"objective": "full", "backend": "stream", "precision": "fp32", "chunk": 500}
    with Largest() as largest:
        nway_loss(xs, **told).backward()
    assert largest.numel < 12**4 / 8
    with Largest() as clip:
        pair = [x.detach().float().requires_grad_() for x in rows(2, 600, 4)]
        nway_loss(pair, backend="stream", precision="fp32", chunk=10_000).backward()
    assert clip.numel < 600 * 600 / 10


def test_gram_similarities_are_refused_in_words() -> None:
    problem = Problem(xs=(torch.ones(2, 2),) * 3, similarity="dist", scale=torch.tensor(1.0))
    with pytest.raises(ValueError, match="use backend 'gram' or 'materialize'"):
        stream.reduce_tuples(problem, "lse")
