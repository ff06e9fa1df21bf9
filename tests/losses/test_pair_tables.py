"""The tables add up to the definitions, and keep their digits where inner products lose them."""

from __future__ import annotations

import pytest
import torch

from tests.losses import reference
from tests.losses.negatives import inputs, unit
from trimtab.losses.similarity import FORMULAS, LINEAR, SUMMED, pair_list, pair_tables


@pytest.mark.parametrize("similarity", SUMMED)
@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_tables_add_up_to_the_similarity(similarity: str, n: int) -> None:
    b = 3
    xs = inputs(n, b, 6)
    factor = torch.tensor(3.0, dtype=torch.float64)
    rows = [unit(x) for x in xs] if similarity == "paircos" else xs
    node, pair = pair_tables(rows, similarity, factor)
    assert node.shape == (n, b)
    assert pair.shape == (n * (n - 1) // 2, b, b)
    total = torch.zeros([b] * n, dtype=torch.float64)
    for m in range(n):
        total = total + node[m].reshape([b if k == m else 1 for k in range(n)])
    for p, (m, k) in enumerate(pair_list(n)):
        total = total + pair[p].reshape([b if j in (m, k) else 1 for j in range(n)])
    expected = reference.similarity(xs, similarity)
    torch.testing.assert_close(total, 3.0 * (expected.square() if similarity == "norm" else expected))


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
