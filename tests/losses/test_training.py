"""The losses must teach: six real views of handwritten digits find each other, beside a loss that cannot."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.matrix import sampled


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark itself, so that its figures and this test cannot drift apart."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import nway_training

    return nway_training


LEAST = {"axis norm": 0.4, "joint norm": 0.15, "full norm": 0.4, "axis paircos": 0.4, "axis mip": 0.05}


def found(bench: ModuleType, name: str, *, batch: int, steps: int) -> tuple[float, float]:
    """R@1 of the left-out view, and the norm of the first gradient."""
    train, held = bench.digit_views()
    arm = next(arm for arm in bench.arms() if arm.name == name)
    encoders, first = bench.train(arm, train, batch=batch, steps=steps, seed=1)
    return bench.retrieval(arm, encoders, held)[0], first


@pytest.mark.parametrize(
    ("name", "least"),
    sampled({name: (name, least) for name, least in LEAST.items()}, ["axis norm", "full norm"]),
)
def test_six_views_of_a_digit_find_each_other(bench: ModuleType, name: str, least: float) -> None:
    score, first = found(bench, name, batch=6, steps=120)
    assert score > least
    assert first > 0.1


def test_the_product_of_unit_vectors_teaches_nothing(bench: ModuleType) -> None:
    score, first = found(bench, "control: version 0", batch=6, steps=120)
    assert score < 0.04
    assert first < 0.02


def test_views_are_six_real_measurements(bench: ModuleType) -> None:
    train, held = bench.digit_views()
    assert [len(v) for v in train] == [1437] * 6
    assert [len(v) for v in held] == [360] * 6
    assert len({v.shape[1] for v in train}) >= 3


def test_s_a_six_maps_of_a_latent_vector_are_learned_in_300_steps(bench: ModuleType) -> None:
    train, held = bench.latent_views(0)
    arm = next(arm for arm in bench.arms() if arm.name == "axis norm")
    encoders, _ = bench.train(arm, train, batch=8, steps=300, seed=0)
    assert bench.retrieval(arm, encoders, held)[0] >= 0.80
