"""The tables add up to the definitions, and keep their digits where inner products lose them."""

from __future__ import annotations

import pytest
import torch

from tests.losses import reference
from tests.losses.negatives import inputs
from trimtab.losses.pairs import FORMULAS, LINEAR, SUMMED, pair_list, pair_tables, unit_rows


@pytest.mark.parametrize("similarity", SUMMED)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_tables_add_up_to_the_similarity(similarity: str, n: int) -> None:
    b = 3
    xs = inputs(n, b, 6)
    node, pair = pair_tables(xs, similarity)
    assert node.shape == (n, b)
    assert pair.shape == (n * (n - 1) // 2, b, b)
    total = torch.zeros([b] * n, dtype=torch.float64)
    for m in range(n):
        total = total + node[m].reshape([b if k == m else 1 for k in range(n)])
    for p, (m, k) in enumerate(pair_list(n)):
        total = total + pair[p].reshape([b if j in (m, k) else 1 for j in range(n)])
    expected = reference.similarity(xs, similarity)
    torch.testing.assert_close(total, expected.square() if similarity == "norm" else expected)


def test_every_similarity_but_the_product_is_in_one_list() -> None:
    assert set(LINEAR) < set(SUMMED)
    assert not set(SUMMED) & set(FORMULAS)
    with pytest.raises(ValueError, match="similarity is 'mip': tables exist for norm, "):
        pair_tables(inputs(2, 2, 2), "mip")


def test_distances_of_near_rows_keep_their_digits_in_float32() -> None:
    x = torch.nn.functional.normalize(torch.randn(8, 512), dim=1)
    y = x + 1e-4 * torch.randn(8, 512) / 512**0.5
    _, pair = pair_tables([x, y], "dist")
    exact = torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist").square()
    assert pair.dtype == torch.float32
    assert ((pair[0] - exact).abs() / exact).max() < 1e-6
    gram = 2 - 2 * (x @ y.T).diagonal()  # what float32 alone would give
    assert ((gram - exact.diagonal()).abs() / exact.diagonal()).max() > 0.1


def test_equal_rows_are_at_distance_zero_exactly() -> None:
    x = torch.randn(6, 300, requires_grad=True)
    _, pair = pair_tables([x, x.detach().clone()], "dist")
    assert pair[0].diagonal().tolist() == [0.0] * 6
    assert (pair[0] > 0).sum() == 30
    pair.sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("size", [1e-30, 1e-20, 1.0, 1e20, 1e30])
def test_unit_rows_at_any_length(size: float) -> None:
    base = torch.randn(4, 5)
    x = (base * size).requires_grad_()
    unit = unit_rows(x)
    torch.testing.assert_close(unit, base / base.norm(dim=1, keepdim=True))
    (unit * torch.randn(4, 5)).sum().backward()
    assert torch.isfinite(x.grad).all()
    moved = x.grad * size  # of the unscaled row: across it, never along
    assert (moved * base).sum(1).abs().max() < 1e-5 * moved.norm() * base.norm()


def test_a_zero_row_stays_zero_with_zero_gradient() -> None:
    x = torch.randn(3, 4)
    x[1] = 0
    x.requires_grad_()
    unit = unit_rows(x)
    assert unit[1].tolist() == [0.0] * 4
    (unit[0] @ unit[1] + unit[1] @ unit[2]).backward()
    assert torch.isfinite(x.grad).all()
    assert torch.isnan(unit_rows(torch.tensor([[1.0, torch.nan]]))).any()
