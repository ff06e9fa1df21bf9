"""What the settings of an optimizer amount to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from trimtab.sample.probes.group_settings import told_by_settings


def made(kind: type[Any], **settings: Any) -> dict[str, float]:
    return told_by_settings(kind([torch.zeros(2, requires_grad=True)], **settings))


def test_decay_is_told_per_step_where_it_is_taken_off_the_weights() -> None:
    assert made(optim.AdamW, lr=1e-3, weight_decay=10.0)["decay_rate"] == pytest.approx(1e-2)
    assert made(optim.SGD, lr=0.1, weight_decay=5e-4)["decay_rate"] == pytest.approx(5e-5)
    assert made(optim.SGD, lr=0.1, weight_decay=5e-4, momentum=0.9)["decay_rate"] == pytest.approx(5e-4)
    assert "decay_pull" not in made(optim.AdamW, lr=1e-3, weight_decay=10.0)


@pytest.mark.parametrize("kind", [optim.Adam, optim.RMSprop, optim.Adagrad])
def test_decay_in_a_gradient_that_is_rescaled_is_told_as_it_is(kind: type[Any]) -> None:
    found = made(kind, lr=1e-3, weight_decay=0.1)
    assert found["decay_pull"] == 0.1
    assert "decay_rate" not in found


@pytest.mark.parametrize(
    ("betas", "crossed"), [((0.9, 0.999), None), ((0.5, 0.9), None), ((0.0, 0.99), None), ((0.999, 0.9), 0.098)]
)
def test_betas_that_crossed(betas: tuple[float, float], crossed: float | None) -> None:
    found = made(optim.Adam, lr=1e-3, betas=betas)
    assert found.get("moments_crossed") == (None if crossed is None else pytest.approx(crossed, rel=1e-3))
    assert found["eps"] == 1e-8


def test_the_largest_of_all_groups_counts_and_tensors_are_left_out() -> None:
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "momentum": m} for m in (0.5, 0.999)]
    assert told_by_settings(optim.SGD(groups, lr=0.1))["momentum_kept"] == 0.999
    rate = torch.tensor(1e-3)
    assert "decay_rate" not in made(optim.AdamW, lr=rate, weight_decay=10.0)
    assert told_by_settings(optim.LBFGS([torch.zeros(1, requires_grad=True)])) == {}
