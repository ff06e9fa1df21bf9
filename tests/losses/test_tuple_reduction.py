"""Places of positives are on the host, whatever the default device is."""

from __future__ import annotations

import torch

from trimtab.losses.problem import Problem
from trimtab.losses.tuple_reduction import entries_of, ravel


def test_places_stay_on_the_host_under_a_default_device() -> None:
    xs = tuple(torch.randn(4, 3) for _ in range(3))
    problem = Problem(xs=xs, similarity="norm", scale=torch.tensor(1.0), share=(1, 2))
    with torch.device("meta"):  # any device but the host: nothing there can be read
        entries = entries_of(problem)
        rows = ravel(entries.positives, entries.sizes)
    assert rows.tolist() == [0 * 16 + 2 * 4 + 2, 1 * 16 + 3 * 4 + 3]
