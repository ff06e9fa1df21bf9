"""What the model answers: spread, towers, and the scale of the loss behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.sample.loops import attached, batch, mlp, train
from tests.simulated_device import simulated_device
from trimtab.core.contain import Contained
from trimtab.sample.probes.output import NUM_ROWS, OutputProbe, spread_of, spread_on_device, told_by_columns
from trimtab.sample.watch import SPREAD_EVERY


def looked(output: Any) -> dict[str, Any]:
    probe = OutputProbe(Contained())
    probe.wanted = True
    probe.look(output)
    assert not probe.wanted
    return probe.take()


def test_the_spread_is_the_share_that_differs() -> None:
    assert looked(torch.randn(200, 50))["out_spread"] == pytest.approx(1.0, abs=0.15)
    assert looked(100.0 + torch.randn(200, 50))["out_spread"] == pytest.approx(1e-4, rel=0.2)
    assert looked(torch.randn(1, 50).expand(16, 50))["out_spread"] == pytest.approx(0.0, abs=1e-10)


@pytest.mark.parametrize("shift", [0.0, 3.0, 100.0, math.inf, math.nan])
def test_a_device_sends_two_numbers_and_the_host_makes_the_same_of_them(shift: float) -> None:
    for rows in (shift + torch.randn(32, 50), torch.zeros(32, 50), torch.randn(1, 50).expand(32, 50)):
        sent = {name: float(value) for name, value in spread_on_device(rows).items()}
        got = spread_of({**sent, "loss": 1.0})
        assert set(got) == {"out_spread", "loss"}
        assert got["out_spread"] == pytest.approx(looked(rows)["out_spread"], rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_spread_in_other_types(dtype: torch.dtype) -> None:
    assert looked(torch.randn(64, 50).to(dtype))["out_spread"] == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("shape", [(8, 16, 10), (8, 3, 5, 5), (8, 2)])
def test_every_shape_has_a_spread(shape: tuple[int, ...]) -> None:
    assert 0.3 < looked(torch.randn(shape))["out_spread"] < 1.5


def test_sequences_differ_between_positions_too() -> None:
    assert looked(torch.randn(1, 16, 10).expand(8, 16, 10))["out_spread"] > 0.5


@pytest.mark.parametrize(
    "output",
    [None, "text", torch.randn(8), torch.randn(2, 5), torch.ones(8, 5, dtype=torch.int64), torch.zeros(8, 0), []],
)
def test_outputs_that_say_nothing(output: Any) -> None:
    assert looked(output) == {}


def test_zeros_and_values_that_are_not_finite_are_no_collapse() -> None:
    assert looked(torch.zeros(8, 5))["out_spread"] == 1.0
    assert looked(torch.full((8, 5), math.nan))["out_spread"] == 1.0
    assert looked(torch.full((8, 5), math.inf))["out_spread"] == 1.0


def test_the_first_tensor_of_a_structure_is_the_output() -> None:
    wide, flat = torch.randn(8, 5), torch.ones(8, 3)
    assert looked({"logits": wide, "hidden": flat})["out_spread"] > 0.5
    assert looked((flat, wide))["out_spread"] == pytest.approx(0.0, abs=1e-10)


def test_it_looks_once_when_asked() -> None:
    probe = OutputProbe(Contained())
    seen = []
    for i in range(15):
        probe.wanted |= i % 5 == 1
        probe.look(torch.randn(8, 5))
        seen.append("out_spread" in probe.take())
    assert seen == [i % 5 == 1 for i in range(15)]


def test_of_the_micro_batches_of_a_step_the_first_is_looked_at() -> None:
    probe = OutputProbe(Contained())
    probe.wanted = True
    probe.look(torch.randn(8, 5))
    probe.look(torch.ones(8, 5))
    assert probe.take()["out_spread"] > 0.5


def test_a_guard_asks_every_few_steps() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 3 * SPREAD_EVERY)
    due = [i == 1 or (i > 0 and i % SPREAD_EVERY == 0) for i in range(3 * SPREAD_EVERY)]
    assert [v is not None for v in kept.all("out_spread")] == due


def test_towers_of_one_shape() -> None:
    facts = looked((torch.randn(8, 5), torch.ones(8, 5) + 1e-6 * torch.randn(8, 5), torch.randn(8, 5)))
    assert facts["towers"] == 3.0
    assert facts["tower"] == 1.0
    assert facts["towers_spread"] < 1e-6
    assert facts["towers_widest"] > 0.5


@pytest.mark.parametrize(
    ("dtype", "told"), [(torch.float32, set()), (torch.float16, {"float16"}), (torch.bfloat16, {"bfloat16"})]
)
def test_the_precision_of_the_weights_is_told(dtype: torch.dtype, told: set[str]) -> None:
    model = torch.nn.Linear(4, 2, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        for _ in range(3):
            model(torch.randn(8, 4, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name in ("float16", "bfloat16"):
        assert kept.all(name) == [1.0 if name in told else None] * 3


def test_tensors_of_different_shapes_are_no_towers() -> None:
    assert set(looked((torch.randn(8, 5), torch.randn(8, 4)))) == {"out_spread"}
    assert set(looked(torch.randn(8, 5))) == {"out_spread"}


@pytest.mark.parametrize(
    ("output", "num"),
    [
        (torch.randn(8, 5), 5),
        (torch.randn(8, 7, 5), 5),
        (torch.randn(8, 5, 4, 4), 5),
        ((torch.randn(8, 5), torch.randn(8, 5)), 8),
        ((torch.randn(8, 5), torch.randn(8, 4)), 0),
        (torch.randn(8), 0),
        (None, 0),
    ],
)
def test_how_many_answers_there_are(output: Any, num: int) -> None:
    probe = OutputProbe(Contained())
    probe.wanted = True
    probe.look(output)
    assert probe.num_answers == num


# -- the scale of the loss -----------------------------------------------------------------------------------------


def factor(logits: Tensor, loss: Callable[[Tensor], Tensor], kind: str = "nll") -> float | None:
    probe = OutputProbe(Contained())
    probe.listen, probe.loss_kind = True, kind
    output = logits.clone().requires_grad_(True) * 1.0
    probe.look(output)
    loss(output).backward()
    value = probe.take().get("loss_factor")
    return None if value is None else float(value)


LABELS = torch.arange(32) % 5


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.125, 65536.0])
def test_a_mean_cross_entropy_times_a_factor(scale: float) -> None:
    logits = torch.randn(32, 5)
    assert factor(logits, lambda out: scale * functional.cross_entropy(out, LABELS)) == pytest.approx(scale, rel=1e-3)


@pytest.mark.parametrize("num", [2, 4, 8])
def test_divided_by_the_number_of_micro_batches(num: int) -> None:
    logits = torch.randn(32, 5)
    assert factor(logits, lambda out: functional.cross_entropy(out, LABELS) / num) == pytest.approx(1 / num, rel=1e-3)


def test_ignored_targets_do_not_count() -> None:
    labels = LABELS.clone()
    labels[::3] = -100
    assert factor(torch.randn(32, 5), lambda out: functional.cross_entropy(out, labels)) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("low", [-150.0, -math.inf])
def test_an_answer_without_any_chance_does_not_matter(low: float) -> None:
    logits = torch.randn(2 * NUM_ROWS, 5)
    logits[::2, 0] = low  # the gradient there is exactly zero
    labels = 1 + torch.arange(2 * NUM_ROWS) % 4
    assert factor(logits, lambda out: functional.cross_entropy(out, labels)) == pytest.approx(1.0, rel=1e-3)


def test_language_models_have_their_classes_last() -> None:
    tokens = torch.randint(0, 11, (4, 9))
    logits = torch.randn(4, 9, 11)
    plain = factor(logits, lambda out: functional.cross_entropy(out.reshape(-1, 11), tokens.reshape(-1)))
    assert plain == pytest.approx(1.0, rel=1e-3)
    shifted = factor(
        logits, lambda out: functional.cross_entropy(out[:, :-1].reshape(-1, 11), tokens[:, 1:].reshape(-1))
    )
    assert shifted == pytest.approx(1.0, rel=1e-3)


def test_pixels_have_their_classes_second() -> None:
    scene = torch.randint(0, 5, (3, 6, 6))
    assert factor(torch.randn(3, 5, 6, 6), lambda out: functional.cross_entropy(out, scene)) == pytest.approx(
        1.0, rel=1e-3
    )


def test_a_sum_is_as_many_times_the_mean() -> None:
    logits = torch.randn(32, 5)
    found = factor(logits, lambda out: functional.cross_entropy(out, LABELS, reduction="sum"))
    assert found == pytest.approx(32.0, rel=1e-3)


@pytest.mark.parametrize(
    "loss",
    [
        lambda out: out.square().mean(),
        lambda out: functional.mse_loss(out, torch.zeros_like(out)),
        lambda out: functional.binary_cross_entropy_with_logits(out, (torch.rand(32, 5) > 0.5).float()),
        lambda out: functional.cross_entropy(out, LABELS, weight=torch.tensor([1.0, 5.0, 0.1, 2.0, 9.0])),
        lambda out: functional.cross_entropy(out, torch.softmax(torch.randn(32, 5), -1)),
        lambda out: 0.0 * out.sum(),
    ],
)
def test_other_losses_give_none(loss: Callable[[Tensor], Tensor]) -> None:
    assert factor(torch.randn(32, 5), loss) is None


def test_it_listens_only_when_asked_and_only_to_cross_entropies() -> None:
    logits = torch.randn(32, 5)
    assert factor(logits, lambda out: functional.cross_entropy(out, LABELS), kind="mse") is None
    assert factor(logits, lambda out: functional.cross_entropy(out, LABELS), kind="") is None
    probe = OutputProbe(Contained())
    probe.loss_kind = "nll"
    output = logits.requires_grad_(True) * 1.0
    probe.look(output)
    assert not output._backward_hooks


def test_outputs_without_a_graph_are_not_listened_to() -> None:
    probe = OutputProbe(Contained())
    probe.listen, probe.loss_kind = True, "nll"
    probe.look(torch.randn(8, 5))
    probe.look(None)
    assert "loss_factor" not in probe.take()


@pytest.mark.parametrize(("divided", "want"), [(False, 1.0), (True, 0.25)])
def test_accumulation_in_a_real_loop(divided: bool, want: float) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (guard, kept):
        for _ in range(12):
            for _ in range(4):
                x, y = batch(32)
                loss = functional.cross_entropy(model(x), y) / (4 if divided else 1)
                guard.observe(loss=loss)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    factors = [f for f in kept.all("loss_factor") if f is not None]
    assert factors == pytest.approx([want] * len(factors), rel=1e-3)
    assert factors
    assert [f.name for f in guard.findings] == ([] if divided else ["accumulation-not-divided"])


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("logs", [False, True])
def test_a_softmax_over_the_samples_is_told_from_one_over_the_choices(away: bool, logs: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(32, 5)
    with simulated_device() if away else nullcontext():
        for dim, told in ((0, 1.0), (1, 0.0)):
            found = told_by_columns(values.log_softmax(dim) if logs else values.softmax(dim))
            assert float(found.get("batch_softmax", 0.0)) == told
        for other in (values, values.relu(), -values.abs(), torch.zeros(32, 5), torch.full((32, 5), float("nan"))):
            assert float(told_by_columns(other).get("batch_softmax", 0.0)) == 0.0
