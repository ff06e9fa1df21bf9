"""What a gradient is made of: by hand-made vectors, and in real loops."""

from __future__ import annotations

import math
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from tests.sample.loops import attached, batch, loss_of, mlp, train
from tests.simulated_device import simulated_device
from trimtab.core.contain import Contained
from trimtab.sample.measure.reference import PAIRS
from trimtab.sample.probes.sentinel import (
    DOTS,
    EARLY,
    EVERY,
    LOOSE,
    RUN,
    SIZE,
    TOLERANCE,
    Products,
    Sentinel,
    facts_of,
    made_of,
    resolved,
)

Vector = NDArray[np.float64]


def products(arrived: Vector, grad: Vector, left: Vector | None = None) -> list[float]:
    old = np.zeros_like(arrived) if left is None else left
    pairs = ((arrived, arrived), (arrived, grad), (grad, grad), (arrived, old), (grad, old), (old, old))
    return [float(a @ b) for a, b in pairs]


def vector(seed: int, size: int = 64) -> Vector:
    return np.random.default_rng(seed).normal(size=size)


scales = st.floats(1e-6, 1e6)
seeds = st.integers(0, 10_000)


@given(seeds, scales, scales)
def test_a_scaled_gradient_was_zeroed(seed: int, coefficient: float, size: float) -> None:
    arrived = size * vector(seed)
    handed, carried = made_of(products(arrived, coefficient * arrived), TOLERANCE)
    assert handed == pytest.approx(coefficient, rel=1e-6)
    assert carried == 0.0


@given(seeds, st.floats(1e-6, 1.0), scales)
def test_a_clipped_gradient_was_zeroed_whatever_was_left(seed: int, coefficient: float, size: float) -> None:
    arrived, left = size * vector(seed), size * vector(seed + 1)
    handed, carried = made_of(products(arrived, coefficient * arrived, left), TOLERANCE)
    assert handed == pytest.approx(coefficient, rel=1e-6)
    assert carried == 0.0


@given(seeds, st.floats(1e-3, 1e3), st.floats(0.05, 20), scales)
def test_what_was_left_is_found_with_its_share(seed: int, coefficient: float, share: float, size: float) -> None:
    arrived, left = size * vector(seed), size * vector(seed + 1)
    assume(abs(arrived @ left) < 0.9 * math.sqrt((arrived @ arrived) * (left @ left)))
    handed, carried = made_of(products(arrived, coefficient * (arrived + share * left), left), TOLERANCE)
    assert handed == pytest.approx(coefficient, rel=1e-3)
    assert carried == pytest.approx(share, rel=1e-3)


@given(seeds, st.floats(0.1, 10))
def test_something_else_in_it_is_not_explained(seed: int, amount: float) -> None:
    arrived, left = vector(seed), vector(seed + 1)
    grad = arrived + amount * vector(seed + 2)
    assert made_of(products(arrived, grad), TOLERANCE) == (None, None)
    assert made_of(products(arrived, grad, left), TOLERANCE) == (None, None)


@given(seeds)
def test_a_little_noise_is_forgiven(seed: int) -> None:
    arrived = vector(seed)
    handed, carried = made_of(products(arrived, arrived + 1e-5 * vector(seed + 1), vector(seed + 2)), TOLERANCE)
    assert handed == pytest.approx(1.0, abs=1e-4)
    assert carried == 0.0


def test_collinear_leftovers_are_told_by_the_size() -> None:
    arrived = vector(0)
    handed, carried = made_of(products(arrived, 2.0 * arrived, arrived), TOLERANCE)  # a full batch: the same again
    assert (handed, carried) == pytest.approx((1.0, 1.0))
    handed, carried = made_of(products(arrived, arrived, 5.0 * arrived), TOLERANCE)
    assert (handed, carried) == pytest.approx((1.0, 0.0))


def test_collinear_leftovers_and_noise_cannot_be_told_apart() -> None:
    arrived = vector(0)
    assert made_of(products(arrived, arrived + vector(1), 3.0 * arrived), TOLERANCE) == (None, None)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
@pytest.mark.parametrize("which", [(0,), (1,), (2,), (0, 1), (0, 1, 2)])
def test_what_is_not_finite_says_nothing_wrong(bad: float, which: tuple[int, ...]) -> None:
    vectors = [vector(0), vector(0) + vector(1), vector(1)]
    for i in which:
        vectors[i][3] = bad
    with np.errstate(all="ignore"):
        dots = products(*vectors)
    for value in made_of(dots, TOLERANCE):
        assert value is None or math.isfinite(value)
    for value in facts_of([*dots, 0.0, 0.0], TOLERANCE, 1.0).values():
        assert math.isfinite(value)


def test_nothing_says_nothing() -> None:
    assert made_of([0.0] * 6, TOLERANCE) == (None, None)
    assert made_of(products(vector(0), -vector(0)), TOLERANCE)[1] is None  # turned round: not ours to explain


@settings(max_examples=50)
@given(seeds)
def test_the_cosine_is_that_of_successive_gradients(seed: int) -> None:
    arrived, before = vector(seed), vector(seed + 1)
    dots = [*products(arrived, 0.5 * arrived), float(arrived @ before), float(before @ before)]
    facts = facts_of(dots, TOLERANCE, 4.0)
    want = float(arrived @ before) / math.sqrt(float(arrived @ arrived) * float(before @ before))
    assert facts["grad_cos"] == pytest.approx(want)
    assert facts["handed"] == pytest.approx(2.0)
    assert facts["carried"] == 0.0


def test_products_that_a_device_sent_are_resolved() -> None:
    arrived, left = vector(0), vector(1)
    dots = [*products(arrived, arrived + left, left), 0.0, 0.0]
    sent = dict(zip(DOTS, dots, strict=True)) | {
        "dots/tolerance": TOLERANCE,
        "dots/scale": 1.0,
        "dots/num": 64.0,
        "loss": 2.0,
    }
    out = resolved(sent)
    assert out["carried"] == pytest.approx(1.0)
    assert out["loss"] == 2.0
    assert not any(name.startswith("dots/") for name in out)
    assert resolved({"loss": 2.0}) == {"loss": 2.0}


def test_products_on_a_device_are_those_of_the_host() -> None:
    four = [torch.randn(64) for _ in range(4)]
    got = Products(four[0], four[1], four[2], four[3]).computed().reshape(-1).tolist()
    for name, (i, j) in zip(DOTS, PAIRS, strict=True):
        assert got[int(name[5:])] == pytest.approx(float(torch.dot(four[i], four[j])), rel=1e-4, abs=1e-5)
    got = Products(four[0], four[1], None, None).computed()
    assert torch.equal(got[2:], torch.zeros(2, 4))
    assert Products(four[0], four[1], None, None).dense
    assert not Products(four[0], four[1].double(), None, None).dense


# -- in a loop -----------------------------------------------------------------------------------------------------


def late(values: list[float | None]) -> list[float]:
    """Without the first step, in which nobody listens yet."""
    return [v for v in values[1:] if v is not None]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_plain_loop(kind: Any) -> None:
    model = mlp()
    optimizer = kind(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 10)
    assert kept.all("backwards") == [None] * 10  # one, as it should be
    assert late(kept.all("handed")) == pytest.approx([1.0] * 9)
    assert kept.all("carried") == [None] * 10
    assert kept.all("same_gradients") == [None] * 10
    assert len(late(kept.all("grad_cos"))) == 8


def listened(num: int) -> list[bool]:
    """Step by step; in the first there is nobody yet."""
    return [0 < i < EARLY or (i >= EARLY and i % EVERY < RUN) for i in range(num)]


def test_it_listens_early_and_then_now_and_then() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 3 * EVERY)
    assert [v is not None for v in kept.all("handed")] == listened(3 * EVERY)
    assert [v for v in kept.all("handed") if v is not None] == pytest.approx([1.0] * sum(listened(3 * EVERY)))
    assert kept.all("carried") == [None] * (3 * EVERY)
    assert kept.all("backwards") == [None] * (3 * EVERY)


def test_backwards_are_counted_in_every_step_that_is_listened_to() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 2 * EVERY, after=lambda step: loss_of(model).backward())
        optimizer.zero_grad()
    want = [2.0 if heard else None for heard in listened(2 * EVERY)]
    assert kept.all("backwards")[1:] == want[1:]


def test_what_is_forgotten_later_is_found_at_the_next_listening() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        for step in range(2 * EVERY):
            loss_of(model).backward()
            optimizer.step()
            if step < EARLY:
                optimizer.zero_grad()
    want = [i >= EVERY and heard for i, heard in enumerate(listened(2 * EVERY))]
    assert [v is not None for v in kept.all("carried")] == want
    assert [v for v in kept.all("carried") if v is not None] == pytest.approx([1.0] * RUN, abs=0.02)


def test_forgotten_zero_grad() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        for _ in range(10):
            loss_of(model).backward()
            optimizer.step()
    assert late(kept.all("carried")) == pytest.approx([1.0] * 9, abs=0.02)
    assert late(kept.all("handed")) == pytest.approx([1.0] * 9, abs=0.02)


def test_forgotten_zero_grad_on_one_full_batch() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    x, y = batch(seed=1)
    with attached(model, optimizer) as (_, kept):
        for _ in range(6):
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    assert min(late(kept.all("carried"))) > 0.9


@pytest.mark.parametrize("num", [2, 4, 8])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulation_carries_nothing(num: int, set_to_none: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        for _ in range(8):
            for _ in range(num):
                (loss_of(model) / num).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert late(kept.all("backwards")) == [float(num)] * 7
    assert kept.all("carried") == [None] * 8
    assert late(kept.all("handed")) == pytest.approx([1.0] * 7, rel=1e-4)


@pytest.mark.parametrize("limit", [1e-3, 0.05])
def test_the_loops_own_clipping(limit: float) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    coefficients: list[float] = []

    def clip(step: int) -> None:
        norm = float(nn.utils.clip_grad_norm_(model.parameters(), limit))
        coefficients.append(min(limit / norm, 1.0))

    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 8, between=clip)
    assert late(kept.all("handed")) == pytest.approx(coefficients[1:], rel=1e-3)
    assert kept.all("carried") == [None] * 8


def test_a_double_step_uses_the_same_gradients() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 6, between=lambda step: optimizer.step())
    assert kept.all("same_gradients")[2:] == [None, 1.0] * 5
    assert kept.all("backwards")[3::2] == [0.0] * 5


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroing_in_place_or_not_is_silent(set_to_none: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        for _ in range(8):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    assert late(kept.all("handed")) == pytest.approx([1.0] * 7)  # it was looked at
    assert kept.all("carried") == [None] * 8
    assert kept.all("same_gradients") == [None] * 8


def test_a_step_without_a_backward_after_zeroing_in_place_is_no_double_step() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        for _ in range(4):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
    assert kept.all("same_gradients") == [None] * 8


@pytest.mark.parametrize("unscaled", [True, False])
def test_a_scaler_hands_on_what_arrived_unscaled(unscaled: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with attached(model, optimizer, scaler=scaler) as (_, kept):
        for _ in range(8):
            scaler.scale(loss_of(model)).backward()
            if unscaled:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert late(kept.all("handed")) == pytest.approx([1.0] * 7, rel=1e-3)
    assert kept.all("carried") == [None] * 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_of_gradients(dtype: torch.dtype) -> None:
    model = mlp().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with attached(model, optimizer) as (_, kept):
        for _ in range(6):
            for _ in range(2):
                x, y = batch()
                nn.functional.cross_entropy(model(x.to(dtype)), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert kept.all("carried") == [None] * 6
    assert late(kept.all("handed"))
    assert late(kept.all("handed")) == pytest.approx([1.0] * len(late(kept.all("handed"))), rel=2 * LOOSE)


def test_a_noisy_gradient_is_not_explained() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def disturb(step: int) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad += 0.3 * torch.randn_like(p.grad)

    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 8, between=disturb)
    assert late(kept.all("handed")) == []
    assert late(kept.all("carried")) == []


def test_a_gradient_that_is_not_finite_is_silent() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def break_it(step: int) -> None:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.fill_(math.nan if step == 3 else 1.0)

    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 6, between=break_it)
    assert all(math.isfinite(v) for v in late(kept.all("handed")))


def test_the_head_is_listened_to_and_the_hook_is_taken_off() -> None:
    model = mlp()
    sentinel = Sentinel(Contained())
    sentinel.choose(list(model.parameters()))
    assert not sentinel.chosen  # nothing has a gradient yet
    assert sentinel.before(0, 1.0) == {}
    loss_of(model).backward()
    sentinel.choose(list(model.parameters()))
    assert sentinel.chosen
    head = model[2].weight
    assert head._backward_hooks
    sentinel.remove()
    assert not head._backward_hooks
    assert not sentinel.chosen
    sentinel.remove()


def test_frozen_and_sparse_parameters_are_not_chosen() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    table(torch.tensor([1, 2])).sum().backward()
    frozen = nn.Parameter(torch.randn(3, 3), requires_grad=False)
    bias = nn.Parameter(torch.randn(3))
    bias.sum().backward()
    sentinel = Sentinel(Contained())
    sentinel.choose([bias, table.weight, frozen])
    assert bias._backward_hooks
    sentinel.remove()


def test_a_parameter_that_loses_its_gradient() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    weight.sum().backward()
    sentinel = Sentinel(Contained())
    sentinel.choose([weight])
    sentinel.after()
    weight.grad = None
    assert sentinel.before(1, 1.0) == {"backwards": 0.0}
    sentinel.after()
    weight.sum().backward()
    assert sentinel.before(2, 1.0)["carried"] == 0.0


def test_only_the_first_elements_are_kept() -> None:
    weight = nn.Parameter(torch.randn(100, 100))
    weight.sum().backward()
    sentinel = Sentinel(Contained())
    sentinel.choose([weight])
    weight.sum().backward()
    assert sentinel._arrived.size == SIZE
    sentinel.after()
    assert sentinel._left.size == SIZE
    sentinel.remove()


def test_infinities_that_cancel_do_not_warn() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            for sign in (1.0, -1.0):
                (model(torch.ones(2, 4)).sum() * sign * (math.inf if step == 2 else 1.0)).backward()
            optimizer.step()
            optimizer.zero_grad()


def dropped(between: str, *, passes: int = 3) -> float | None:
    """What is heard where gradients are zeroed before each of several backward passes, with something in between."""
    torch.manual_seed(0)
    net = nn.Linear(8, 6)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], 0.1)
    sentinel = Sentinel(Contained())
    net(torch.randn(4, 8)).square().mean().backward()
    sentinel.choose(list(net.parameters()))
    heard: Any = {}
    for step in range(2):
        for i in range(passes):
            if between != "nothing":
                net.zero_grad()
            net(torch.randn(4, 8)).square().mean().backward()
            if i == 0 and between == "a moved weight":
                with torch.no_grad():
                    net.weight.add_(1e-3)
            if i == 0 and between == "another step":
                other.step()
                Sentinel.num_steps += 1
        if between == "clipping":
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        heard = sentinel.before(step, 1.0)
        sentinel.after()
        net.zero_grad()
    sentinel.remove()
    return heard.get("dropped")


@pytest.mark.parametrize(
    ("between", "found"),
    [("zeros", 2.0), ("clipping", 2.0), ("nothing", None), ("a moved weight", None), ("another step", None)],
)
def test_gradients_that_are_zeroed_before_the_step_are_counted(between: str, found: float | None) -> None:
    assert dropped(between) == found
    assert dropped(between, passes=1) is None


@pytest.mark.parametrize("away", [False, True])
def test_a_gradient_of_zeros_was_not_dropped(away: bool) -> None:
    """The first rows of an embedding have none in most batches of an accumulation, and a dead unit never has one."""
    weight = torch.ones(64, requires_grad=True)
    sentinel = Sentinel(Contained())
    weight.grad = torch.ones(64)
    with simulated_device() if away else nullcontext():
        sentinel.choose([weight])
        weight.grad = None
        for factor in (0.0, 0.0, 1.0):
            (factor * weight).sum().backward()
        heard = sentinel.before(0, 1.0)
        for later in sentinel.take_later():
            later(heard, {})
        sentinel.remove()
    assert heard["backwards"] == 3.0
    assert "dropped" not in heard


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize(("kind", "found"), [("twice", [1.0]), ("micro-batches", []), ("once", []), ("zero", [])])
def test_one_loss_taken_back_twice_is_told_from_two_micro_batches(kind: str, found: list[float], away: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with simulated_device() if away else nullcontext(), attached(model, optimizer) as (_, kept):
        for _ in range(8):
            optimizer.zero_grad()
            for i in range(1 if kind == "once" else 2):
                if i == 0 or kind == "micro-batches":
                    loss = loss_of(model) * (0.0 if kind == "zero" else 1.0)
                loss.backward(retain_graph=True)
            optimizer.step()
    heard = [v for v in kept.all("doubled") if v is not None]
    assert sorted(set(heard)) == found
    assert len(heard) >= 5 * len(found)


def test_a_weight_of_a_few_numbers_is_enough_where_the_sum_is_exact() -> None:
    net = nn.Linear(4, 1)
    sentinel = Sentinel(Contained())
    net(torch.randn(3, 4)).square().mean().backward()
    sentinel.choose(list(net.parameters()))
    carried = []
    for step in range(4):
        net(torch.randn(3, 4)).square().mean().backward()
        carried.append(sentinel.before(step, 1.0).get("carried"))
        sentinel.after()
        if step >= 2:
            net.zero_grad()
    sentinel.remove()
    assert carried[1:] == [1.0, 1.0, 0.0]
