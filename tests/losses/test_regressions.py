"""What once went wrong in the losses, each with the least that shows it."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from trimtab.losses import TooCostly, dispatch, nway_cost, nway_loss
from trimtab.losses import tuple_reduction as products

XS = [torch.randn(4, 8, generator=torch.Generator().manual_seed(m)) for m in range(6)]


@pytest.mark.parametrize("similarity", ["paircos", "sqnorm", "dist2"])
def test_a_contraction_out_of_range_gives_way_to_another_backend(
    similarity: str, caplog: pytest.LogCaptureFixture
) -> None:
    told: dict[str, Any] = {"similarity": similarity, "objective": "full", "logit_scale": 2000.0, "precision": "fp32"}
    dispatch._log_once.cache_clear()
    with caplog.at_level(logging.INFO, logger="trimtab"):
        outs = [nway_loss(XS[:3], backend="contract", details=True, **told) for _ in range(2)]
    assert outs[0].backend == "gram"
    assert torch.equal(outs[0].loss, nway_loss(XS[:3], backend="gram", **told))
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert nway_loss(XS[:3], backend="contract", details=True, **{**told, "logit_scale": 5.0}).backend == "contract"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("similarity", ["paircos", "sqnorm", "dist2"])
def test_a_bad_number_comes_out_of_the_contraction(similarity: str, bad: float) -> None:
    xs = [x.clone() for x in XS[:3]]
    xs[1][2, 3] = bad
    for scale in (1.0, 2000.0):
        told: dict[str, Any] = {"similarity": similarity, "logit_scale": scale, "precision": "fp32"}
        assert not nway_loss(xs, objective="full", backend="contract", **told).isfinite()


def test_smoothing_of_two_modalities_by_contraction() -> None:
    told: dict[str, Any] = {"similarity": "paircos", "objective": "axis", "label_smoothing": 0.1}
    by_name, dense = (nway_loss(XS[:2], backend=backend, **told) for backend in ("contract", "dense"))
    torch.testing.assert_close(by_name, dense)


def test_what_a_refusal_proposes_is_not_refused_itself() -> None:
    def proposed(xs: list[torch.Tensor], **told: Any) -> int:
        with pytest.raises(TooCostly) as refusal:
            nway_loss(xs, **told)
        return int(str(refusal.value).partition("What fits: B=")[2].split()[0])

    wide: dict[str, Any] = {"similarity": "paircos", "objective": "full", "logit_scale": 1e4, "budget_s": 0.01}
    many: dict[str, Any] = {"objective": "sampled", "num_samples": 200, "budget_s": 0.05}
    for told, batch in ((wide, 24), (many, 256)):  # the contraction is not certified; the sets count
        xs = [torch.randn(batch, 8, generator=torch.Generator().manual_seed(m)) for m in range(5)]
        nway_loss([x[: proposed(xs, **told)] for x in xs], **told)
    with pytest.raises(TooCostly, match=r"s\. Raise budget_s"):
        nway_loss(XS, objective="axis", budget_bytes=1)


def test_random_sets_cost_what_they_take_and_nothing_elsewhere() -> None:
    assert nway_cost(3, 64, 32, objective="full", num_samples=7) == nway_cost(3, 64, 32, objective="full")
    few, many = (nway_cost(3, 1024, 64, objective="sampled", num_samples=r) for r in (1, 100))
    assert many.tuples == 100 * few.tuples
    assert many.bytes < 20 * few.bytes  # beyond 16 million logits in tiles


def test_the_tf32_switch_is_as_it_was_after_interleaved_uses_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(switch, "fp32_precision") else "allow_tf32"
    before, ieee = getattr(switch, name), {"fp32_precision": "ieee"}.get(name, False)
    card = torch.device("cuda")
    monkeypatch.setattr(torch, "autocast", lambda *_a, **_k: nullcontext())  # there may be no card
    try:
        setattr(switch, name, {"fp32_precision": "tf32"}.get(name, True))
        user = getattr(switch, name)
        one, two = products.products_in("ieee", card), products.products_in("ieee", card)
        one.__enter__()
        two.__enter__()
        one.__exit__(None, None, None)  # as two threads may
        assert getattr(switch, name) == ieee
        two.__exit__(None, None, None)
        assert getattr(switch, name) == user
        with pytest.raises(KeyError), products.products_in("ieee", card):
            raise KeyError
        assert getattr(switch, name) == user
    finally:
        setattr(switch, name, before)


@pytest.mark.parametrize(
    ("objective", "backend"),
    [("axis", "dense"), ("joint", "dense"), ("sampled", "dense"), ("full", "gram"), ("full", "materialize")],
)
def test_volumes_of_near_vectors_keep_their_digits_in_float32(objective: str, backend: str) -> None:
    near = [XS[0] + 0.05 * x for x in XS[1:4]]
    grads = []
    for precision in ("fp32", "fp64"):
        xs = [x.clone().requires_grad_() for x in near]
        told: dict[str, Any] = {"objective": objective, "backend": backend, "precision": precision}
        told["generator"] = torch.Generator().manual_seed(0)
        nway_loss(xs, similarity="volume", logit_scale=400.0, **told).backward()
        grads.append(torch.stack([x.grad for x in xs]))  # type: ignore[misc]
    assert (grads[0] - grads[1]).norm() < 1e-5 * grads[1].norm()  # it was 1e-4 to 1e-3


def test_what_cannot_be_computed_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="meta device and hold no numbers"):
        nway_loss([x.to("meta") for x in XS[:2]])
    with pytest.raises(TypeError, match=r"logit_scale is None; expected a number"):
        nway_loss(XS[:2], logit_scale=None)
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)  # tracing itself warns of its end
    with pytest.raises(TypeError, match=r"recorded by torch\.jit\.trace"):
        nway_loss(XS[:2])
