"""Every column against float64 numpy, for every dtype and every awkward tensor."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.core.types import ABSENT, Column
from trimtab.sample.measure import reference as measure

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def reference(tensor: torch.Tensor) -> dict[Column, float]:
    x = measure.plain(tensor).double().reshape(-1).numpy()
    n = max(x.size, 1)
    with np.errstate(all="ignore"):
        return {
            Column.L2: float(np.sqrt((x * x).sum())),
            Column.ABSMAX: float(np.abs(x).max()) if x.size else 0.0,
            Column.MEAN: float(x.sum() / n),
            Column.NAN: float(np.isnan(x).sum()),
            Column.INF: float(np.isinf(x).sum()),
            Column.ZERO_FRAC: float((x == 0).sum() / n),
            Column.UNDERFLOW_FRAC: float(((x != 0) & (np.abs(x) < 2.0**-24)).sum() / n),
        }


def check(row: torch.Tensor, tensor: torch.Tensor) -> None:
    want = reference(tensor)
    for i, column in enumerate(Column):
        got = float(row[i])
        if math.isnan(want[column]):
            assert math.isnan(got), column
        else:
            # Where huge values cancel, a mean depends on the order of summation.
            cancelled = 1e-6 + 1e-15 * want[Column.ABSMAX] if column is Column.MEAN else 1e-12
            close = {"rel": 2e-5, "abs": cancelled}
            with np.errstate(over="ignore"):  # a norm beyond float32 is inf in the table
                expected = float(np.float32(want[column]))
            assert got == pytest.approx(expected, **close), column


def rows_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The row by the CPU way and by the reference that any other device uses."""
    plain = measure.plain(tensor)
    return [measure.full([plain])[0], measure.reference_row(plain, True)]


values = st.one_of(
    st.floats(-1e3, 1e3, width=32),
    st.sampled_from([0.0, -0.0, 1e-30, -1e-8, 2.0**-24, 2.0**-25, 1e20, -1e20, 3e38, math.inf, -math.inf, math.nan]),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(values, min_size=0, max_size=40))
def test_float32_rows_match_float64(xs: list[float]) -> None:
    tensor = torch.tensor(xs, dtype=torch.float32)
    for row in rows_of(tensor):
        check(row, tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 7, 1000, 70_001])
def test_every_dtype_and_size(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    tensor = torch.randn(size, generator=generator).to(dtype)
    if size > 5:
        tensor[3] = 0
        tensor[4] = 1e-8
    for row in rows_of(tensor):
        check(row, tensor)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_value_in_the_last_chunk_is_counted(bad: float) -> None:
    tensor = torch.randn(100_003)
    tensor[-1] = bad
    for row in rows_of(tensor):
        check(row, tensor)


def test_strided_sparse_and_complex() -> None:
    strided = torch.randn(30, 40).t()[::2]
    for row in rows_of(strided):
        check(row, strided)
    duplicated = torch.sparse_coo_tensor(
        torch.tensor([[1, 1, 3]]), torch.tensor([2.0, 3.0, -1.0]), (5,), check_invariants=True
    )
    assert float(measure.norms([measure.plain(duplicated)])[0]) == pytest.approx(math.sqrt(26))
    number = torch.tensor([3 + 4j, 0j], dtype=torch.complex64)
    assert float(measure.norms([measure.plain(number)])[0]) == pytest.approx(5.0)


def test_norms_equal_what_clip_grad_norm_computes() -> None:
    params = [torch.nn.Parameter(torch.randn(s)) for s in [(64, 32), (32,), (5, 5, 5)]]
    for p in params:
        p.grad = torch.randn_like(p)
    want = torch.nn.utils.clip_grad_norm_(params, 1e9)
    got = measure.total(measure.norms([p.grad for p in params]))
    assert torch.equal(got, want)


def test_norms_of_mixed_and_low_precision() -> None:
    big = torch.full((1000,), 100.0)
    assert float(measure.norms([big.half()])[0]) == pytest.approx(3162.27, rel=1e-4)
    assert float(measure.norms([(10 * big).half()])[0]) == pytest.approx(31622.7, rel=1e-3)
    mixed = measure.norms([big.half(), big.bfloat16(), big, big.double()])
    assert mixed.tolist() == pytest.approx([3162.27] * 4, rel=1e-3)
    assert measure.norms([]).shape == (0,)


def test_wide_norms_are_finite_exactly_when_the_values_are() -> None:
    huge = torch.full((8,), 1e20)
    assert float(measure.norms([huge])[0]) == math.inf
    assert float(measure.wide_norms([huge])[0]) == pytest.approx(1e20 * math.sqrt(8))
    huge[0] = math.inf
    assert not math.isfinite(float(measure.wide_norms([huge])[0]))


def test_missing_gradients_are_marked() -> None:
    table = measure.scatter(torch.tensor([[1.0, 5.0], [2.0, 6.0]]), [0, 2], 3)
    assert table.tolist() == [[1.0, 5.0], [ABSENT, 0.0], [2.0, 6.0]]


def test_fractions_can_be_left_out() -> None:
    row = measure.full([torch.ones(4)], fractions=False)[0]
    assert row[:5].tolist() == [2.0, 1.0, 1.0, 0.0, 0.0]
    assert torch.isnan(row[5:]).all()
    assert torch.isnan(measure.reference_row(torch.ones(4), False)[5:]).all()
