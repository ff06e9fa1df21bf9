"""The checks of wiring: each names its trouble, alone, and stays silent on a sound training."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.doctor.kit import alarms, by_hand, data, line, look, net, sound
from trimtab.doctor.checklist import Status


def plain(model, x, y, optimizer):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def test_e12_a_sound_training_has_no_alarm_and_is_left_as_it_was():
    given = sound()
    before = copy.deepcopy(given["model"].state_dict())
    rng = torch.get_rng_state()
    report = look(given)
    assert alarms(report) == []
    assert report.ok
    assert all(torch.equal(v, given["model"].state_dict()[k]) for k, v in before.items())
    assert torch.equal(rng, torch.get_rng_state())
    assert not given["optimizer"].state
    assert all(p.grad is None for p in given["model"].parameters())


def test_a_step_that_does_everything_itself_is_not_stepped_twice():
    given = by_hand(plain)
    report = look(given)
    assert alarms(report) == []
    assert line(report, "double-step").evidence == "3 steps, each on a backward pass of its own"


def no_zero(model, x, y, optimizer):
    loss = cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def twice(model, x, y, optimizer):
    loss = plain(model, x, y, optimizer)
    optimizer.step()
    return loss


def in_eval(model, x, y, optimizer):
    model.eval()
    return plain(model, x, y, optimizer)


def without_grad(model, x, y, optimizer):
    with torch.no_grad():
        return cross_entropy(model(x), y)


def detached(model, x, y, optimizer):
    return cross_entropy(model(x).detach(), y)


def never_stepped(model, x, y, optimizer):
    optimizer.zero_grad()
    loss = cross_entropy(model(x), y)
    loss.backward()
    return loss


def put_back(model, x, y, optimizer):
    before = copy.deepcopy(model.state_dict())
    loss = plain(model, x, y, optimizer)
    model.load_state_dict(before)
    return loss


def constant_input(model, x, y, optimizer):
    return plain(model, torch.ones_like(x), y, optimizer)


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (no_zero, "stale-gradient"),
        (twice, "double-step"),
        (in_eval, "eval-mode"),
        (without_grad, "no-grad"),
        (detached, "loss-detached"),
        (never_stepped, "weights-unchanged"),
        (put_back, "weight-corrupted"),
        (constant_input, "loss-ignores-input"),
    ],
)
def test_e2_e17_a_wrong_loop_is_named_and_nothing_else(step, name):
    report = look(by_hand(step))
    assert alarms(report) == [name]
    failed = line(report, name)
    assert failed.cause
    assert failed.evidence
    assert failed.fix


def other_head() -> dict:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model[2] = nn.Linear(16, 3)
    return sound(model=model, optimizer=optimizer)


def first_layer_only() -> dict:
    model = net()
    return sound(model=model, optimizer=torch.optim.Adam(model[0].parameters(), lr=1e-2))


def frozen() -> dict:
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return sound(model=model.requires_grad_(False), optimizer=optimizer)


def copied() -> dict:
    model = net()
    return sound(model=model, optimizer=torch.optim.Adam(copy.deepcopy(model).parameters(), lr=1e-2))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (other_head, "stale-optimizer"),
        (copied, "stale-optimizer"),
        (first_layer_only, "optimizer-misses-parameters"),
        (frozen, "missing-gradient"),
        (lambda: sound(lr=0.0), "learning-rate"),
        (lambda: sound(lr=30.0), "learning-rate"),
        (lambda: sound(lr=1e-12), "learning-rate"),
        (lambda: sound(loss_fn=lambda out, y: cross_entropy(out, y) * 0.0), "zero-gradient"),
        (lambda: sound(loss_fn=lambda out, y: cross_entropy(out, y, reduction="none")), "loss-not-scalar"),
    ],
)
def test_e16_a_wrong_optimizer_or_loss_is_named_and_nothing_else(make, name):
    assert alarms(look(make())) == [name]


def with_nan() -> list:
    batches = data()
    batches[2][0][5, 1] = float("nan")
    return batches


def with_label(value: int) -> list:
    batches = data()
    batches[2][1][4] = value
    return batches


@pytest.mark.parametrize(
    ("loader", "name"),
    [
        (with_nan, "nonfinite-input"),
        (lambda: with_label(3), "label-range"),
        (lambda: with_label(-1), "label-range"),
        (list, "empty-batch"),
        (lambda: [(x[:0], y[:0]) for x, y in data()], "empty-batch"),
    ],
)
def test_e5_wrong_data_are_named_and_nothing_else(loader, name):
    assert alarms(look(sound(loader=loader()))) == [name]


def test_an_exception_of_the_step_is_a_finding_with_its_place():
    def broken(model, x, y, optimizer):
        raise KeyError("no such column")

    report = look(by_hand(broken))
    assert alarms(report) == ["step-exception"]
    assert "test_first_steps.py" in line(report, "step-exception").evidence
    assert line(report, "double-step").status is Status.NA


def test_experts_without_tokens_and_branches_that_begin_at_zero_are_left_alone():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(4))
            self.branch = nn.Linear(8, 8)
            self.scale = nn.Parameter(torch.zeros(8))
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            h = self.experts[0](x) if bool(x[0, 0] > 0) else self.experts[2](x)
            return self.head(h + self.scale * self.branch(h))

    assert alarms(look(sound(model=Mixed()))) == []


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_a_clip_limit_that_is_proposed_fits_the_norm_that_was_seen(scale):
    def step(model, x, y, optimizer):
        optimizer.zero_grad()
        loss = scale * cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-5)
        optimizer.step()
        return loss

    found = line(look(by_hand(step)), "chronic-clipping")
    norm, limit = (float(re.search(p, t)[1]) for p, t in ((r"norm (\S+)", found.evidence), (r", (\S+)\)", found.fix)))
    assert found.status is Status.FAIL
    assert norm < limit < 4 * norm


def test_a_clip_at_the_wrong_place_keeps_its_own_limit():
    def step(model, x, y, optimizer):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        loss.backward()
        optimizer.step()
        return loss

    assert "clip_grad_norm_(model.parameters(), 0.25)" in line(look(by_hand(step)), "clip-order").fix
