"""Who else wrote to weights and moments, and how far a step went."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.sample.loops import attached, batch, loss_of, mlp, train
from trimtab.core.contain import Contained
from trimtab.sample.probes.ledger import BUDGET, MIN_KEPT, NUM_NAMED, Ledger, Part

Facts = tuple[dict[str, float], dict[str, tuple[str, ...]]]


class Loop:
    """A model, its optimizer and a ledger, stepped by hand."""

    def __init__(self, model: nn.Module | None = None, kind: Any = torch.optim.Adam, **kwargs: Any) -> None:
        self.model = mlp() if model is None else model
        self.optimizer = kind(self.model.parameters(), **({"lr": 1e-3} | kwargs))
        names, params = zip(*self.model.named_parameters(), strict=True)
        self.ledger = Ledger(self.optimizer, names, params, Contained())
        self.dtype = params[0].dtype

    def step(self) -> tuple[Facts, Facts]:
        self.optimizer.zero_grad()
        x, y = batch()
        nn.functional.cross_entropy(self.model(x.to(self.dtype)), y).backward()
        before = self.ledger.before()
        self.optimizer.step()
        with np.errstate(all="ignore"):
            return before, self.ledger.after()

    def quiet(self, num: int = 3) -> None:
        for _ in range(num):
            (facts, notes), (after, _) = self.step()
            assert (facts, notes) == ({}, {})
            assert set(after) == {"update_ratio"}
            assert 0 < after["update_ratio"] < 0.5

    def found(self) -> Facts:
        return self.step()[0]


def test_nothing_is_found_where_only_the_optimizer_writes() -> None:
    for kind, kwargs in ((torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {})):
        Loop(kind=kind, **kwargs).quiet(6)


def test_the_update_ratio_is_exact_for_a_small_model() -> None:
    loop = Loop()
    loop.quiet()
    before = torch.cat([p.detach().reshape(-1).clone() for p in loop.model.parameters()])
    _, (facts, _) = loop.step()
    after = torch.cat([p.detach().reshape(-1) for p in loop.model.parameters()])
    assert facts["update_ratio"] == pytest.approx(float((after - before).norm() / after.norm()), rel=1e-4)


@pytest.mark.parametrize("share", [1e-3, 0.1, 1.0, 50.0])
def test_a_change_from_outside_is_named_with_its_size(share: float) -> None:
    loop = Loop()
    loop.quiet()
    weight = loop.model[0].weight
    with torch.no_grad():
        weight *= 1.0 + share
    facts, notes = loop.found()
    assert facts["outside"] == pytest.approx(share, rel=1e-3)
    assert notes["outside"] == ("0.weight",)
    assert "state_outside" not in facts
    loop.quiet()  # told once


def test_one_flipped_bit_is_seen() -> None:
    loop = Loop()
    loop.quiet()
    with torch.no_grad():
        loop.model[2].bias.view(torch.int32)[1] ^= 1
    facts, notes = loop.found()
    assert 0 < facts["outside"] < 1e-3
    assert notes["outside"] == ("2.bias",)


def test_the_largest_changes_are_named_first_and_not_too_many() -> None:
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(6)], nn.Linear(4, 3))
    loop = Loop(model)
    loop.quiet()
    with torch.no_grad():
        for i in range(6):
            model[i].weight *= 1.0 + 0.1 * (i + 1)
    facts, notes = loop.found()
    assert facts["outside"] == pytest.approx(0.6, rel=0.01)
    assert notes["outside"] == ("5.weight", "4.weight", "3.weight", "2.weight")[:NUM_NAMED]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_weight_that_is_not_finite(bad: float) -> None:
    loop = Loop()
    loop.quiet()
    with torch.no_grad():
        loop.model[0].weight[0, 0] = bad
    (facts, notes), (after, named) = loop.step()
    assert facts["outside"] == math.inf
    assert notes["outside"] == ("0.weight",)
    assert after["weights_bad"] > 0
    assert "0.weight" in named["weights_bad"]
    assert all(math.isfinite(v) for v in after.values())


def moments(loop: Loop, key: str = "exp_avg") -> list[Tensor]:
    return [state[key] for state in loop.optimizer.state.values()]


def test_moments_changed() -> None:
    loop = Loop()
    loop.quiet()
    moments(loop)[0].mul_(3.0)
    facts, notes = loop.found()
    assert facts["state_outside"] > 0.5
    assert notes["state_outside"] == ("0.weight: exp_avg",)
    assert "outside" not in facts
    assert "state_lost" not in facts
    loop.quiet()


def test_moments_zeroed_are_lost() -> None:
    loop = Loop()
    loop.quiet()
    for key in ("exp_avg", "exp_avg_sq"):
        for moment in moments(loop, key):
            moment.zero_()
    assert loop.found()[0]["state_lost"] > 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_moments_that_are_not_finite(bad: float) -> None:
    loop = Loop()
    loop.quiet()
    moments(loop, "exp_avg_sq")[1][0] = bad
    (facts, notes), (after, named) = loop.step()
    assert facts["state_bad"] == 1.0
    assert notes["state_bad"] == ("0.bias: exp_avg_sq",)
    assert after["state_bad"] >= 1.0
    assert "0.bias: exp_avg_sq" in named["state_bad"]


def test_state_cleared_is_lost_once() -> None:
    loop = Loop()
    loop.quiet()
    loop.optimizer.state.clear()
    facts, _ = loop.found()
    assert facts["state_lost"] == 4.0
    loop.quiet()


def test_a_counter_set_back_is_a_loss() -> None:
    loop = Loop()
    loop.quiet(5)
    for state in loop.optimizer.state.values():
        state["step"].zero_()
    assert loop.found()[0]["state_lost"] == 5.0


def test_loading_the_optimizer_is_declared() -> None:
    loop = Loop()
    loop.quiet()
    state = copy.deepcopy(loop.optimizer.state_dict())
    loop.quiet(4)
    loop.optimizer.load_state_dict(state)
    loop.quiet()


def test_loading_a_state_into_a_fresh_optimizer_is_declared() -> None:
    loop, other = Loop(), Loop()
    loop.quiet()
    loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    other.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict()))
    loop.quiet()
    other.quiet()


def test_loading_the_model_is_declared() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    states: list[dict[str, Tensor]] = []

    def load(step: int) -> None:
        if step == 2:
            states.append(copy.deepcopy(model.state_dict()))
        if step == 6:
            model.load_state_dict(states[0])

    with attached(model, optimizer) as (guard, kept):
        train(model, optimizer, 10, after=load)
    assert kept.all("outside") == [None] * 10
    assert guard.findings == []


def test_a_swap_in_and_out_is_silent() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def swap(step: int) -> None:
        own = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            model(batch()[0])
            for p, value in zip(model.parameters(), own, strict=True):
                p.copy_(value)

    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 8, after=swap)
    assert kept.all("outside") == [None] * 8
    assert kept.all("state_outside") == [None] * 8


def test_a_swap_that_is_not_undone_is_found() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def swap(step: int) -> None:
        if step == 4:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)

    with attached(model, optimizer) as (_, kept):
        train(model, optimizer, 8, after=swap)
    assert [v is not None for v in kept.all("outside")] == [i == 5 for i in range(8)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_types_of_weights(dtype: torch.dtype) -> None:
    loop = Loop(mlp().to(dtype), kind=torch.optim.SGD, lr=0.1, momentum=0.9)
    loop.quiet()
    with torch.no_grad():
        loop.model[0].weight *= 1.5
    facts, notes = loop.found()
    assert facts["outside"] == pytest.approx(0.5, rel=0.02)
    assert notes["outside"] == ("0.weight",)
    loop.quiet()


def test_storage_replaced_with_the_same_values_is_silent() -> None:
    loop = Loop()
    loop.quiet()
    for p in loop.model.parameters():
        p.data = p.data.clone()
    loop.quiet()
    loop.model[0].weight.data = 2.0 * loop.model[0].weight.data
    facts, notes = loop.found()
    assert facts["outside"] == pytest.approx(1.0, rel=1e-3)
    assert notes["outside"] == ("0.weight",)
    loop.quiet()


def test_a_model_made_channels_last_is_still_followed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ledger = Ledger(optimizer, ["w"], [model[0].weight], Contained())
    ratios = []
    for step in range(6):
        if step == 2:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        model(torch.randn(4, 3, 6, 6)).square().mean().backward()
        ledger.before()
        optimizer.step()
        ratios.append(ledger.after()[0]["update_ratio"])
    assert min(ratios) > 0


def test_a_model_made_bfloat16_is_still_followed() -> None:
    loop = Loop(kind=torch.optim.SGD, lr=0.5)
    loop.quiet()
    loop.model.bfloat16()
    loop.dtype = torch.bfloat16
    loop.step()
    loop.quiet()


def test_moments_put_in_place_of_others_are_seen() -> None:
    loop = Loop()
    loop.quiet()
    for state in loop.optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 5.0)
    assert "state_outside" in loop.found()[0]


def test_parameters_that_are_not_contiguous_from_the_start() -> None:
    model = nn.Linear(4, 3, bias=False)
    model.weight = nn.Parameter(torch.randn(4, 3).t())
    assert not model.weight.is_contiguous()
    loop = Loop(model, kind=torch.optim.SGD, lr=0.1)
    loop.quiet()
    with torch.no_grad():
        model.weight[2, 3] += 100.0
    facts, notes = loop.found()
    assert facts["outside"] > 1
    assert notes["outside"] == ("weight",)


def test_no_more_than_the_budget_is_kept() -> None:
    sizes = [1_000_000, 300_000, 1000, 10, 1]
    tensors = [(str(i), torch.randn(n)) for i, n in enumerate(sizes)]
    part = Part(tensors)
    assert part.size <= BUDGET + MIN_KEPT * len(sizes)
    assert part.bounds[-1] == part.size
    kept = np.diff(part.bounds)
    assert kept.tolist()[-2:] == [10, 1]
    assert (kept >= np.minimum(sizes, MIN_KEPT)).all()
    out = np.zeros(part.size, np.float32)
    part.read(out)
    for (_, tensor), a, b in zip(tensors, part.bounds[:-1], part.bounds[1:], strict=True):
        assert np.array_equal(out[a:b], tensor[: b - a].numpy())


def test_a_part_of_nothing_and_of_empty_tensors() -> None:
    part = Part([("a", torch.zeros(0)), ("b", torch.zeros(0, 3))])
    assert part.size == 0
    part.read(np.zeros(0, np.float32))
    assert part.names == []


def test_what_is_sent_is_what_the_tensors_hold_now() -> None:
    tensor, turned = torch.randn(50), torch.randn(6, 4).t()
    part = Part([("a", tensor), ("b", turned)])
    for _ in range(3):
        tensor[7] += 1.0
        turned += 1.0
        assert torch.equal(part.sent(), torch.cat([tensor, turned.reshape(-1)]))
    tensor.data = torch.randn(50)
    assert torch.equal(part.sent()[:50], tensor)


def test_large_models_are_judged_by_a_part() -> None:
    model = nn.Sequential(nn.Linear(4, 300), nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 3))
    loop = Loop(model, kind=torch.optim.SGD, lr=1e-3)
    loop.quiet()
    with torch.no_grad():
        loop.model[2].weight *= 3.0
    facts, notes = loop.found()
    assert facts["outside"] == pytest.approx(2.0, rel=1e-2)
    assert notes["outside"] == ("2.weight",)


def test_second_moments_say_what_adam_expects() -> None:
    loop = Loop()
    assert loop.ledger.second_moment() is None
    loop.quiet(8)  # it is told every fourth step
    want = sum(float((s["exp_avg_sq"] / (1 - 0.999 ** float(s["step"]))).sum()) for s in loop.optimizer.state.values())
    assert loop.ledger.second_moment() == pytest.approx(want, rel=1e-4)
    sgd = Loop(kind=torch.optim.SGD, momentum=0.9)
    sgd.quiet()
    assert sgd.ledger.second_moment() is None


def test_parameters_that_get_their_first_gradient_later_bring_their_moments() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    loop = Loop(model)
    loop.quiet()
    model[0].requires_grad_(True)
    loop.quiet(2)
    moments(loop)[-1].mul_(10.0)
    assert "state_outside" in loop.found()[0]


def test_the_hook_is_taken_off_the_optimizer() -> None:
    loop = Loop()
    assert loop.optimizer._optimizer_load_state_dict_post_hooks
    loop.ledger.remove()
    loop.ledger.remove()
    assert not loop.optimizer._optimizer_load_state_dict_post_hooks


def test_an_optimizer_without_state_or_hooks() -> None:
    class Bare:
        param_groups: tuple[object, ...] = ()

    weight = torch.ones(4)
    ledger = Ledger(Bare(), ["w"], [weight], Contained())
    ledger.before()
    weight += 1.0
    assert ledger.after()[0]["update_ratio"] == pytest.approx(0.5)
    assert ledger.before() == ({}, {})
    weight += 1.0
    assert ledger.before()[0]["outside"] == pytest.approx(0.5)
    ledger.remove()


def test_a_real_loop_names_the_corrupted_weight() -> None:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def corrupt(step: int) -> None:
        if step == 15:
            with torch.no_grad():
                model[2].weight.normal_(std=5.0)

    with attached(model, optimizer) as (guard, kept):
        train(model, optimizer, 20, after=corrupt)
    assert kept.notes("outside")[16] == ("2.weight",)
    assert [(f.name, f.step, f.subject) for f in guard.findings if f.name == "weight-corrupted"] == [
        ("weight-corrupted", 16, ("2.weight",))
    ]
    assert loss_of(model).isfinite()


def test_moments_that_come_and_go_are_looked_up_again() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ledger = Ledger(optimizer, ["weight", "bias"], list(model.parameters()), Contained())
    for step in range(6):
        model(torch.randn(5, 4)).square().mean().backward()
        facts, _ = ledger.before()
        assert not facts
        optimizer.step()
        optimizer.zero_grad()
        ledger.after()
        if step == 2:
            optimizer.state[model.weight]["extra"] = torch.randn(7)  # a plug-in keeps something of its own
        if step == 4:
            del optimizer.state[model.weight]["extra"]


def test_weights_in_shared_memory_may_be_moved_by_other_processes() -> None:
    """Hogwild: what looks like corruption is the work of a neighbour."""
    findings = {}
    for shared in (False, True):
        model = mlp()
        if shared:
            model.share_memory()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

        def neighbour(step: int, model: Any = model) -> None:
            if step == 15:
                with torch.no_grad():
                    model[2].weight.normal_(std=5.0)

        with attached(model, optimizer) as (guard, _):
            train(model, optimizer, 20, after=neighbour)
        findings[shared] = {f.name for f in guard.findings}
    assert "weight-corrupted" in findings[False]
    assert "weight-corrupted" not in findings[True]
