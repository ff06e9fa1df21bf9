"""What a loss costs is known, chosen by and refused for before anything is allocated."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.losses.agree import NAMES
from tests.losses.largest import Largest
from trimtab.losses import TooCostly, nway_cost, nway_logits, nway_loss
from trimtab.losses import cost as machines
from trimtab.losses.cost import BACKENDS, can, check_tuples, choose, double_is_cheap

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("sizes", "name", "objective", "device", "backend"),
    [
        ((6, 64), "mip", "axis", CPU, "dense"),
        ((6, 64), "volume", "joint", CUDA, "dense"),
        ((6, 64), "mip", "sampled", CPU, "dense"),
        ((4, 24), "mip", "full", CPU, "materialize"),
        ((6, 20), "mip", "full", CPU, "stream"),
        ((6, 20), "mip", "full", CUDA, "triton"),
        ((6, 20), "mip", "sigmoid", CPU, "stream"),
        ((6, 20), "norm", "full", CPU, "gram"),
        ((6, 20), "norm", "full", CUDA, "triton"),
        ((3, 20), "norm", "full", CUDA, "gram"),
        ((6, 20), "paircos", "full", CPU, "contract"),
        ((6, 20), "dist2", "sigmoid", CPU, "gram"),
        ((6, 20), "dist", "full", CUDA, "gram"),
        ((6, 20), "volume", "full", CPU, "gram"),
        ((2, 128), "mip", "full", CPU, "dense"),
        ((2, 512), "mip", "full", CPU, "stream"),
        ((2, 32768), "mip", "axis", CPU, "stream"),
        ((2, 32768), "mip", "full", CUDA, "triton"),
        ((2, 32768), "dist", "full", CPU, "dense"),
        ((5, 32768), "norm", "pairwise", CUDA, "triton"),
    ],
)
def test_the_choice(sizes: tuple[int, int], name: str, objective: str, device: torch.device, backend: str) -> None:
    if device == CUDA and torch.cuda.is_available():
        pytest.skip("asks the card that is there")
    assert choose(*sizes, name, objective, device) == backend
    assert can(backend, name, objective, sizes[0])
    assert nway_cost(*sizes, 512, similarity=name, objective=objective, device=device).backend == backend


def test_a_linear_similarity_that_is_not_certified_goes_another_way() -> None:
    assert choose(4, 9, "paircos", "full", CPU, linear=False) == "gram"


def test_something_can_always_be_done() -> None:
    for name in NAMES:
        for objective in ("axis", "joint", "full", "pairwise", "sampled", "sigmoid"):
            for n in (2, 3, 6):
                assert any(can(b, name, objective, n) for b in BACKENDS if b != "auto")


def test_estimates_grow_as_the_problem_does() -> None:
    small, large = (nway_cost(6, b, 512, objective="full", backend="stream") for b in (16, 32))
    assert large.flops == 64 * small.flops == 8 * 32**6 * 512
    assert 30 < large.time_s / small.time_s < 70
    assert large.bytes < 40 * small.bytes
    half = nway_cost(6, 32, 512, objective="full", backend="stream", world=2)
    assert half.flops == large.flops / 2
    one, three = (nway_cost(3, 32, 64, objective="sampled", num_samples=r) for r in (1, 3))
    assert three.tuples == 3 * one.tuples
    pair = nway_cost(2, 32, 64, objective="full")
    assert nway_cost(4, 32, 64, objective="pairwise").tuples == 6 * pair.tuples


def test_a_loss_that_cannot_end_well_is_refused_before_anything_is_allocated() -> None:
    xs = [torch.ones(128, 8)] * 6
    with Largest() as largest, pytest.raises(TooCostly) as refused:
        nway_loss(xs, objective="full", similarity="mip", budget_s=10.0, budget_bytes=2**30)
    assert largest.numel <= 6 * 128 * 8
    text = str(refused.value)
    for part in (r"4\.4e\+12 tuples", "FLOPs", "GiB", "days|h on", "backend 'stream'", "B=128", "1 GiB and 10 s"):
        assert re.search(part, text), (part, text)
    found = re.search(r"What fits: B=(\d+) with the same settings; objective='axis'; objective='sampled'", text)
    assert found
    fits = nway_cost(6, int(found[1]), 8, objective="full")
    assert fits.time_s <= 10
    assert fits.bytes <= 2**30
    nway_loss([x[: int(found[1])] for x in xs], objective="axis", budget_s=10.0, budget_bytes=2**30)


def test_bytes_alone_can_be_too_many_and_budgets_can_be_raised() -> None:
    xs = [torch.ones(12, 8)] * 4
    told: dict[str, Any] = {"objective": "full", "backend": "materialize"}
    with pytest.raises(TooCostly, match="Raise budget_s and budget_bytes"):
        nway_loss(xs, budget_bytes=1000.0, **told)
    assert nway_loss(xs, budget_bytes=1e9, **told).isfinite()
    assert issubclass(TooCostly, ValueError)


def test_memory_that_is_free_is_the_default_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    xs = [torch.ones(64, 8)] * 4
    monkeypatch.setattr("trimtab.losses.cost.free_bytes", lambda device: 2.0**27)
    with pytest.raises(TooCostly, match="budget of 115 MiB"):
        nway_loss(xs, objective="full", backend="materialize")
    with pytest.raises(TooCostly, match=r"1\.68e\+07 numbers.*What fits: B=\d+"):
        nway_logits(xs, similarity="norm")
    with pytest.raises(TooCostly):
        check_tuples(xs, budget_bytes=1000.0)


def test_free_memory_is_what_the_machine_says() -> None:
    assert 2**20 < machines.free_bytes(CPU) < 2**50
    assert machines.free_bytes(torch.device("meta")) > 2**20


def test_float64_where_it_is_cheap() -> None:
    small, large = [torch.ones(8, 16)] * 3, [torch.ones(512, 512)] * 3
    assert double_is_cheap(small, "mip", "full")
    assert not double_is_cheap(large, "mip", "axis")
    assert not double_is_cheap([x.to("meta") for x in small], "mip", "full")


@pytest.mark.parametrize("sizes", [(1, 2, 3), (2, 0, 3), (2, 2, 0)])
def test_sizes_that_are_none(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 2 modalities"):
        nway_cost(*sizes)
    with pytest.raises(ValueError, match="Did you mean 'stream'"):
        nway_cost(2, 2, 2, backend="streem")


def test_kernels_that_cannot_run_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    xs = [torch.ones(3, 4)] * 3
    with pytest.raises(ValueError, match=r"needs a CUDA device.*here: cpu"):
        nway_loss(xs, objective="full", backend="triton", precision="fp32")
    with pytest.raises(ValueError, match=r"torch\.float64.*precision='fp32'"):
        nway_loss([x.double() for x in xs], objective="full", backend="triton")
