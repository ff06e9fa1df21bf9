"""The tuple stream from tables against the definition: every similarity, kind, size, tile, mask and share."""

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
from trimtab.losses.backends import gram
from trimtab.losses.problem import Kind, Problem

KINDS: tuple[Kind, ...] = ("lse", "sum", "softplus")
SIZES = {2: 7, 3: 5, 4: 4, 5: 3, 6: 3}


def problem_of(xs: tuple[Tensor, ...], similarity: str, scale: float | Tensor = 3.0, **more: object) -> Problem:
    return Problem(xs=xs, similarity=similarity, scale=torch.as_tensor(scale, dtype=xs[0].dtype), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("similarity", gram.SIMILARITIES)
@pytest.mark.parametrize("n", SIZES)
def test_value_and_gradients_are_those_of_the_definition(similarity: str, n: int) -> None:
    for kind in KINDS:
        compare(gram.reduce_tuples, inputs(n, SIZES[n], 7), similarity, kind)


@pytest.mark.parametrize("similarity", gram.SIMILARITIES)
def test_any_chunk_gives_the_same(similarity: str) -> None:
    for chunk in (1, 5, 37, 64):
        compare(gram.reduce_tuples, inputs(5, 3, 6), similarity, "lse", chunk=chunk)


@pytest.mark.parametrize("similarity", gram.SIMILARITIES)
def test_absent_entries_are_in_no_tuple(similarity: str) -> None:
    for n, b in ((2, 5), (3, 4), (5, 3)):
        present = torch.rand(n, b, generator=torch.Generator().manual_seed(n)) < 0.7
        present[0, 0] = present[-1, -1] = True
        for kind in KINDS:
            compare(gram.reduce_tuples, inputs(n, b, 6), similarity, kind, present=present, chunk=20)


@pytest.mark.parametrize("kind", KINDS)
def test_where_there_is_no_tuple_there_is_no_gradient(kind: Kind) -> None:
    xs = inputs(3, 3, 4)
    only = torch.eye(3, dtype=torch.bool)[:1].repeat(3, 1)  # nothing but one positive
    none = torch.tensor([[True] * 3, [False] * 3, [True] * 3])  # a modality that is not there
    for present in (only, none):
        value = gram.reduce_tuples(problem_of(xs, "norm", present=present), kind)
        assert value.tolist() == [[-math.inf if kind == "lse" else 0.0] * 3] * 3
        assert all(not g.any() for g in gradients(value, cotangent(3, 3), xs))
    single = inputs(2, 1, 4)
    value = gram.reduce_tuples(problem_of(single, "norm"), kind)
    g = torch.autograd.grad(value, single, torch.ones_like(value))
    assert all(torch.equal(v, torch.zeros_like(v)) for v in g)


@pytest.mark.parametrize("similarity", ["norm", "paircos", "volume"])
@pytest.mark.parametrize("parts", [2, 3, 7])
def test_shares_add_up_to_the_whole(similarity: str, parts: int) -> None:
    xs = inputs(3, 5, 6)
    rows = tuple(unit(x) for x in xs)
    z = 3.0 * reference.similarity(rows, similarity)
    present = torch.ones(3, 5, dtype=torch.bool)
    present[0, 1] = present[1, 3] = False
    for mask in (None, present):
        for kind in KINDS:
            each = [
                gram.reduce_tuples(problem_of(rows, similarity, share=(k, parts), present=mask), kind)
                for k in range(parts)
            ]
            expected = reduced(z, kind, present=mask)
            if kind == "lse":
                weights = torch.softmax(torch.stack(each).detach().nan_to_num(neginf=-1e9), 0)
                close(torch.logsumexp(torch.stack(each).detach(), 0), expected, 1e-12)
            else:
                weights = torch.ones_like(torch.stack(each))
                close(torch.stack(each).sum(0), expected, 1e-12)
            g = cotangent(3, 5)
            whole = gradients(expected, g, xs)
            summed = [gradients(v, g * w, xs) for v, w in zip(each, weights, strict=True)]
            for m in range(3):
                close(torch.stack([s[m] for s in summed]).sum(0), whole[m], 1e-12)


@pytest.mark.parametrize("scale", [1e-4, 40.0, 300.0, 1e4])
def test_any_scale(scale: float) -> None:
    """Beyond the reach of one reference rows and columns have their own: the same numbers."""
    for similarity in ("norm", "sqnorm", "dist", "volume"):
        compare(gram.reduce_tuples, inputs(4, 4, 6), similarity, "lse", scale=scale, chunk=30)


def test_tiles_at_very_different_levels() -> None:
    """A reference that is left and found again, with rows from 1 to 1000 long; and tiles too wide for any."""
    for factor in (3.0, 30.0, 1000.0):
        lengths = torch.logspace(0, math.log10(factor), 5, dtype=torch.float64)[:, None]
        xs = tuple((x.detach() * lengths).requires_grad_() for x in inputs(4, 5, 6))
        compare(gram.reduce_tuples, xs, "norm", "lse", scale=10.0, chunk=20)
        narrow = tuple(x.detach().float().requires_grad_() for x in xs)
        rounding = 2.0 * 4 * factor * 2.0**-24  # of the largest logits
        compare(gram.reduce_tuples, narrow, "norm", "lse", scale=2.0, chunk=20, tolerance=1e-5 + 2 * rounding)


@pytest.mark.parametrize("similarity", gram.SIMILARITIES)
@pytest.mark.parametrize("kind", KINDS)
def test_float32_keeps_five_digits(similarity: str, kind: Kind) -> None:
    compare(gram.reduce_tuples, inputs(4, 6, 32, dtype=torch.float32), similarity, kind, scale=10.0, tolerance=1e-5)


@pytest.mark.parametrize("similarity", gram.SIMILARITIES)
def test_a_small_loss_has_a_small_gradient_of_full_precision(similarity: str) -> None:
    xs = inputs(4, 5, 16, dtype=torch.float32)
    value = gram.reduce_tuples(problem_of(xs, similarity, 25.0), "lse")
    g = cotangent(4, 5)
    for large, small in zip(gradients(value, g, xs), gradients(value, 1e-28 * g, xs), strict=True):
        torch.testing.assert_close(small * 1e28, large, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("similarity", gram.SIMILARITIES)
def test_zero_rows(similarity: str) -> None:
    xs = inputs(4, 4, 6)
    with torch.no_grad():
        xs[0][1] = 0.0
        xs[2][3] = 0.0
    value = gram.reduce_tuples(problem_of(xs, similarity), "lse")
    assert torch.isfinite(value).all()
    assert all(torch.isfinite(g).all() for g in gradients(value, cotangent(4, 4), xs))
    if similarity in ("norm", "sqnorm", "dist2", "dist"):
        close(value, reduced(3.0 * reference.similarity(xs, similarity), "lse"), 1e-12)
    if similarity in ("cosmean", "volume"):  # a tuple with a zero row has similarity 0
        every = reference.similarity([x + 1e-300 for x in xs], "norm").new_zeros([4] * 4)
        alive = [[0, 2, 3], [0, 1, 2, 3], [0, 1, 2], [0, 1, 2, 3]]
        inner = 3.0 * reference.similarity(xs, similarity)[torch.meshgrid(*map(torch.tensor, alive), indexing="ij")]
        every[torch.meshgrid(*map(torch.tensor, alive), indexing="ij")] = inner
        close(value, reduced(every, "lse"), 1e-9)


@pytest.mark.parametrize("similarity", gram.SIMILARITIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_all_rows_equal(similarity: str, dtype: torch.dtype) -> None:
    row = torch.nn.functional.normalize(torch.randn(1, 16, dtype=torch.float64), dim=1).to(dtype)
    xs = tuple(row.repeat(3, 1).requires_grad_() for _ in range(4))
    value = gram.reduce_tuples(problem_of(xs, similarity, 5.0), "lse")
    length = {"norm": 4.0, "sqnorm": 16.0, "paircos": 1.0, "cosmean": 1.0}.get(similarity, 0.0)
    close(value, torch.full((4, 3), math.log(26) + 5 * length, dtype=torch.float64), 20 * torch.finfo(dtype).eps)
    assert all(torch.isfinite(g).all() for g in gradients(value, cotangent(4, 3), xs))
    if similarity in ("dist", "volume"):
        assert all(not g.any() for g in gradients(value, cotangent(4, 3), xs))


def test_a_sum_of_nothing_has_no_direction() -> None:
    x = torch.nn.functional.normalize(torch.randn(3, 64, dtype=torch.float64), dim=1)
    for dtype, error in ((torch.float64, 1e-7), (torch.float32, 2e-3)):
        xs = tuple(v.to(dtype).requires_grad_() for v in (x, -x, x.flip(0), -x.flip(0)))
        value = gram.reduce_tuples(problem_of(xs, "norm", 1.0), "lse")
        close(value, reduced(reference.similarity([v.double() for v in xs], "norm"), "lse"), error)
        assert all(torch.isfinite(g).all() for g in gradients(value, cotangent(4, 3), xs))
    exact = tuple(v.requires_grad_() for v in (torch.ones(2, 3), -torch.ones(2, 3)))
    value = gram.reduce_tuples(problem_of(exact, "norm", 1.0), "lse")
    assert not value.any()
    assert all(not g.any() for g in gradients(value, cotangent(2, 2), exact))


@pytest.mark.parametrize("similarity", gram.SIMILARITIES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_does_not_become_finite(similarity: str, bad: float) -> None:
    xs = inputs(3, 4, 5)
    with torch.no_grad():
        xs[1][2, 0] = bad
    for kind in KINDS:
        value = gram.reduce_tuples(problem_of(xs, similarity), kind)
        assert not torch.isfinite(value[1, 2])
        assert not torch.isfinite(value[0]).any()


@pytest.mark.parametrize("similarity", ["norm", "dist", "volume"])
def test_memory_is_that_of_tables_and_a_tile(similarity: str) -> None:
    b = 6
    xs = inputs(4, b, 4)
    for kind in KINDS if similarity == "norm" else KINDS[:1]:
        with Largest() as seen:
            value = gram.reduce_tuples(problem_of(xs, similarity, chunk=b**2), kind)
            value.sum().backward()
        assert seen.numel <= b**3  # of 1296 tuples


def test_autocast_and_no_grad_change_nothing() -> None:
    xs = tuple(x.detach().float() for x in inputs(3, 4, 8))
    plain = gram.reduce_tuples(problem_of(xs, "norm"), "lse")
    assert not plain.requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        assert torch.equal(gram.reduce_tuples(problem_of(xs, "norm"), "lse"), plain)


def test_the_product_is_not_for_tables() -> None:
    with pytest.raises(ValueError, match="similarity is 'mip': the gram backend has norm"):
        gram.reduce_tuples(problem_of(inputs(2, 2, 2), "mip"), "lse")


@settings(max_examples=12, deadline=None)
@given(
    n=st.integers(2, 4),
    b=st.integers(2, 4),
    similarity=st.sampled_from(gram.SIMILARITIES),
    kind=st.sampled_from(KINDS),
    scale=st.floats(1e-3, 1e3),
    seed=st.integers(0, 1000),
)
def test_the_order_of_samples_and_modalities_does_not_matter(
    n: int, b: int, similarity: str, kind: Kind, scale: float, seed: int
) -> None:
    xs = tuple(x.detach() for x in inputs(n, b, 8, seed=seed))
    generator = torch.Generator().manual_seed(seed)
    samples, modalities = torch.randperm(b, generator=generator), torch.randperm(n, generator=generator)
    value = gram.reduce_tuples(problem_of(xs, similarity, scale), kind)
    moved = gram.reduce_tuples(problem_of(tuple(xs[m][samples] for m in modalities), similarity, scale), kind)
    torch.testing.assert_close(moved, value[modalities][:, samples], rtol=1e-9, atol=1e-9)
