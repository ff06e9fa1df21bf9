"""The generators of Python, numpy and torch go on with the very numbers they would have drawn."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch

from trimtab.checkpoint import rng
from trimtab.core.errors import CheckpointError


def draws() -> list[float]:
    # An odd number of normal ones: Python and numpy keep the second of each pair for later.
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.randn()),
        *torch.rand(3).tolist(),
        *torch.randn(17).tolist(),
    ]


def test_every_generator_goes_on_with_the_same_numbers() -> None:
    random.gauss(0, 1)
    np.random.randn()
    torch.randn(1)
    state = rng.capture()
    expected = draws() + draws()
    rng.restore(state)
    assert draws() + draws() == expected
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    rng.restore(state)
    assert draws() + draws() == expected


def test_taking_the_state_draws_nothing() -> None:
    state = rng.capture()
    first = draws()
    rng.restore(state)
    rng.capture()
    assert draws() == first


def test_a_later_draw_does_not_reach_into_a_state_already_taken() -> None:
    state = rng.capture()
    kept = copy.deepcopy(state)
    draws()
    assert np.array_equal(state["python"]["words"], kept["python"]["words"])
    assert np.array_equal(state["numpy"]["keys"], kept["numpy"]["keys"])
    assert torch.equal(state["torch"], kept["torch"])


def test_an_incomplete_state_is_refused_before_anything_is_touched() -> None:
    state = rng.capture()
    part = {"python": state["python"], "torch": state["torch"]}
    draws()
    before = rng.capture()
    with pytest.raises(CheckpointError, match="lacks numpy"):
        rng.restore(part)
    short = dict(state, torch=state["torch"][:-8])
    with pytest.raises(CheckpointError, match="another version, or is damaged"):
        rng.restore(short)
    expected = draws()
    rng.restore(before)
    assert draws() == expected


def test_devices_that_are_not_here_are_told_by_name(caplog: pytest.LogCaptureFixture) -> None:
    state = rng.capture()
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (here + 1)
    state["cuda"][:here] = torch.cuda.get_rng_state_all() if here else []
    rng.restore(state)
    assert f"random states of {here + 1} CUDA devices, {here} are here" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_generators_go_on_with_the_same_numbers() -> None:
    torch.rand(1, device="cuda")
    state = rng.capture()
    expected = torch.rand(100, device="cuda")
    rng.restore(state)
    assert torch.equal(torch.rand(100, device="cuda"), expected)
