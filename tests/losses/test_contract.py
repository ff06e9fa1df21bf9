"""The exact contraction against the definition, and what its certificate of range promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.losses import reference
from tests.losses.largest import Largest
from tests.losses.negatives import close, compare, cotangent, gradients, inputs, reduced, unit
from trimtab.losses.backends import contract, gram
from trimtab.losses.backends.contract import centred, tables_of
from trimtab.losses.problem import Problem
from trimtab.losses.tuple_reduction import entries_of, outer_sum

SIZES = {2: 7, 3: 6, 4: 5, 5: 3, 6: 3, 7: 2}


def problem_of(xs: tuple[Tensor, ...], similarity: str, scale: float | Tensor = 3.0, **more: object) -> Problem:
    return Problem(xs=xs, similarity=similarity, scale=torch.as_tensor(scale, dtype=xs[0].dtype), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("similarity", contract.SIMILARITIES)
@pytest.mark.parametrize("n", SIZES)
def test_value_and_gradients_are_those_of_the_definition(similarity: str, n: int) -> None:
    far = {2: 900.0, 3: 900.0, 7: 1500.0}.get(n, 1100.0)  # beyond the reach of plain exponentials, and certified
    for chunk in (None, 1, 13):
        for scale in (8.0, far) if similarity == "paircos" else (8.0,):
            compare(contract.reduce_tuples, inputs(n, SIZES[n], 7), similarity, "lse", chunk=chunk, scale=scale)


@pytest.mark.parametrize("similarity", contract.SIMILARITIES)
def test_absent_entries_are_in_no_tuple(similarity: str) -> None:
    for n, b in ((2, 5), (3, 5), (4, 4), (6, 3)):
        present = torch.rand(n, b, generator=torch.Generator().manual_seed(n)) < 0.7
        present[0, 0] = present[-1, -1] = True
        for scale in (3.0, 900.0) if similarity == "paircos" else (3.0,):
            compare(contract.reduce_tuples, inputs(n, b, 6), similarity, "lse", present=present, scale=scale)


def test_where_there_is_no_tuple_there_is_no_gradient() -> None:
    xs = inputs(3, 3, 4)
    only = torch.eye(3, dtype=torch.bool)[:1].repeat(3, 1)
    pair = torch.tensor([[True, True, False], [True, False, False], [True, False, False]])
    none = torch.tensor([[True] * 3, [False] * 3, [True] * 3])
    for present in (only, pair, none):
        compare(contract.reduce_tuples, xs, "paircos", "lse", present=present)
        compare(contract.reduce_tuples, xs, "sqnorm", "lse", present=present)
        assert contract.certified(problem_of(xs, "paircos", present=present))


@pytest.mark.parametrize("similarity", ["dist2", "paircos"])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_shares_add_up_to_the_whole(similarity: str, parts: int) -> None:
    xs = inputs(4, 4, 6)
    rows = tuple(unit(x) for x in xs)
    expected = reduced(3.0 * reference.similarity(rows, similarity), "lse")
    each = torch.stack(
        [contract.reduce_tuples(problem_of(rows, similarity, share=(k, parts)), "lse") for k in range(parts)]
    )
    close(torch.logsumexp(each.detach(), 0), expected, 1e-12)
    g = cotangent(4, 4)
    weights = torch.softmax(each.detach(), 0)
    for mine, whole in zip(gradients(each, g * weights, xs), gradients(expected, g, xs), strict=True):
        close(mine, whole, 1e-12)


def test_shares_are_those_of_the_gram_backend() -> None:
    xs = inputs(3, 5, 6)
    present = torch.ones(3, 5, dtype=torch.bool)
    present[0, 2] = False
    for mask in (None, present):
        one = problem_of(xs, "sqnorm", share=(1, 3), present=mask)
        close(contract.reduce_tuples(one, "lse"), gram.reduce_tuples(one, "lse").detach(), 1e-12)


def test_a_positive_far_above_its_negatives_leaves_no_trace() -> None:
    """Left out of the products, not subtracted from them: 40 nats above all else it would take every digit along."""
    x = torch.nn.functional.normalize(torch.randn(4, 32, generator=torch.Generator().manual_seed(1)), dim=1)
    xs = tuple(x.clone().requires_grad_() for _ in range(6))
    for scale in (50.0, 100.0):  # near, and far
        compare(contract.reduce_tuples, xs, "paircos", "lse", scale=scale, tolerance=1e-5)


@pytest.mark.parametrize("similarity", contract.SIMILARITIES)
def test_float32_keeps_five_digits(similarity: str) -> None:
    for scale in (10.0, 90.0) if similarity == "paircos" else (10.0,):
        xs = inputs(4, 6, 32, dtype=torch.float32)
        compare(contract.reduce_tuples, xs, similarity, "lse", scale=scale, tolerance=1e-5)


@pytest.mark.parametrize("scale", [40.0, 100.0])  # near, and far
def test_a_small_loss_has_a_small_gradient_of_full_precision(scale: float) -> None:
    xs = tuple(unit(x.detach()).requires_grad_() for x in inputs(4, 5, 16, dtype=torch.float32))
    value = contract.reduce_tuples(problem_of(xs, "paircos", scale), "lse")
    g = cotangent(4, 5)
    for large, small in zip(gradients(value, g, xs), gradients(value, 1e-28 * g, xs), strict=True):
        torch.testing.assert_close(small * 1e28, large, rtol=1e-4, atol=1e-5)


def test_zero_and_equal_rows() -> None:
    xs = inputs(3, 4, 6)
    with torch.no_grad():
        xs[0][1] = 0.0
    for similarity in contract.SIMILARITIES:
        value = contract.reduce_tuples(problem_of(xs, similarity), "lse")
        assert all(torch.isfinite(g).all() for g in gradients(value, cotangent(3, 4), xs))
        close(value, gram.reduce_tuples(problem_of(xs, similarity), "lse").detach(), 1e-12)
    row = torch.nn.functional.normalize(torch.randn(1, 16), dim=1)
    same = tuple(row.repeat(3, 1) for _ in range(5))
    value = contract.reduce_tuples(problem_of(same, "paircos", 7.0), "lse")
    close(value, torch.full((5, 3), math.log(80) + 7, dtype=torch.float64), 1e-6)


def test_for_unit_rows_the_certificate_needs_the_scale_alone() -> None:
    """Of six modalities four pairs lie between the smaller groups, each of weight scale / 15, within 1 of 0."""
    xs = inputs(6, 3, 5, dtype=torch.float32)
    assert contract.range_certificate(problem_of(xs, "paircos", 100.0)) == pytest.approx(100 * 2 * 4 / 15)
    with Largest() as seen:
        assert contract.certified(problem_of(xs, "paircos", 100.0))
    assert seen.numel <= 1


@pytest.mark.parametrize("similarity", contract.SIMILARITIES)
@pytest.mark.parametrize("n", [3, 4, 6])
def test_the_certificate_bounds_the_range(similarity: str, n: int) -> None:
    """Measured on the pairs between the two smaller groups, which no moving of single terms can widen."""
    problem = problem_of(tuple(unit(x) for x in inputs(n, 4, 6)), similarity, 2000.0)
    bound = contract.range_certificate(problem)
    tables = centred(tables_of(problem, entries_of(problem)))
    matrix = outer_sum(
        [((i, len(tables.b)), t) for i, t in enumerate(tables.b)], [t.shape[0] for t in tables.b] + [4 ** (n // 3)]
    )
    assert matrix.max() - matrix.min() <= bound * (1 + 1e-12)
    assert bound > 0


def test_far_logits_are_refused_and_the_gram_backend_does_them() -> None:
    for dtype, scale in ((torch.float32, 400.0), (torch.float64, 6000.0)):
        eye = torch.eye(4, dtype=dtype)
        xs = tuple(x.clone().requires_grad_() for x in (eye, -eye, eye, -eye, eye, eye))
        problem = problem_of(xs, "paircos", scale)
        assert not contract.certified(problem)
        with pytest.raises(contract.NotCertified, match=r"nats between two groups of .* Use backend 'gram'"):
            contract.reduce_tuples(problem, "lse")
        compare(
            gram.reduce_tuples, xs, "paircos", "lse", scale=scale, tolerance=1e-5 if dtype == torch.float32 else 1e-9
        )


def test_up_to_the_limit_float32_is_exact() -> None:
    """Opposite blocks, so that the largest entries of one factor meet the smallest of the other."""
    generator = torch.Generator().manual_seed(3)
    base = torch.nn.functional.normalize(torch.randn(5, 8, generator=generator), dim=1)
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])[:, None]
    xs = tuple((base * signs.roll(m, 0)).requires_grad_() for m in range(4))
    limit = contract.range_limit(problem_of(xs, "sqnorm"))
    assert 55 < limit < 72
    unit = contract.range_certificate(problem_of(xs, "sqnorm", 1.0))
    scale = 0.98 * limit / unit
    assert contract.certified(problem_of(xs, "sqnorm", scale))
    assert not contract.certified(problem_of(xs, "sqnorm", 1.05 * limit / unit))
    compare(contract.reduce_tuples, xs, "sqnorm", "lse", scale=scale, tolerance=3e-5)


def test_long_rows_do_not_cost_the_certificate() -> None:
    """A term of one modality alone moves to where it costs nothing: only what pairs say together counts."""
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1, 8, generator=generator)
    xs = tuple(direction + 0.1 * torch.randn(5, 8, generator=generator) for _ in range(3))
    problem = problem_of(xs, "sqnorm", 30.0)
    table = 2 * 30.0 * xs[1] @ xs[2].T
    assert table.max() - table.min() > contract.range_limit(problem)
    assert contract.certified(problem)
    leaves = tuple(x.requires_grad_() for x in xs)
    compare(contract.reduce_tuples, leaves, "sqnorm", "lse", scale=30.0, tolerance=5e-4)  # float32 logits near 3000


def test_nothing_that_is_not_finite_is_certified() -> None:
    for bad in (math.nan, math.inf):
        xs = inputs(3, 3, 4)
        with torch.no_grad():
            xs[2][0, 0] = bad
        assert not contract.certified(problem_of(xs, "sqnorm"))
        assert not contract.certified(problem_of(inputs(3, 3, 4), "paircos", math.nan))
        value = gram.reduce_tuples(problem_of(xs, "sqnorm"), "lse")
        assert not torch.isfinite(value[2, 0])
        cosines = contract.reduce_tuples(problem_of(tuple(unit(x) for x in xs), "paircos"), "lse")
        assert torch.isnan(cosines[:2]).all()  # any unit rows are certified, and NaN among them comes through


def test_memory_is_that_of_matrices_between_groups() -> None:
    b = 5
    xs = inputs(6, b, 4)
    with Largest() as seen:
        contract.reduce_tuples(problem_of(xs, "paircos"), "lse").sum().backward()
    assert seen.numel <= b**4  # of 15 625 tuples


def test_autocast_and_no_grad_change_nothing() -> None:
    xs = tuple(x.detach().float() for x in inputs(3, 4, 8))
    plain = contract.reduce_tuples(problem_of(xs, "paircos"), "lse")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(contract.reduce_tuples(problem_of(xs, "paircos"), "lse"), plain)


def test_what_it_cannot_do_it_says() -> None:
    with pytest.raises(ValueError, match="similarity is 'norm': the contraction has sqnorm, paircos, dist2"):
        contract.reduce_tuples(problem_of(inputs(3, 2, 2), "norm"), "lse")
    with pytest.raises(ValueError, match="kind is 'sum': the contraction only has 'lse'"):
        contract.reduce_tuples(problem_of(inputs(3, 2, 2), "sqnorm"), "sum")


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(3, 7),
    similarity=st.sampled_from(contract.SIMILARITIES),
    scale=st.floats(1e-3, 20.0),
    seed=st.integers(0, 1000),
)
def test_the_same_as_the_gram_backend(n: int, similarity: str, scale: float, seed: int) -> None:
    xs = inputs(n, 3 if n < 6 else 2, 8, seed=seed)
    problem = problem_of(tuple(unit(x) for x in xs), similarity, scale)
    mine, theirs = contract.reduce_tuples(problem, "lse"), gram.reduce_tuples(problem, "lse")
    g = cotangent(*mine.shape, seed=seed)
    close(mine, theirs.detach(), 1e-11)
    for x, y in zip(gradients(mine, g, xs), gradients(theirs, g, xs), strict=True):
        close(x, y, 1e-10)
