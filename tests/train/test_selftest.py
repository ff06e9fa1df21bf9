from __future__ import annotations

import logging
import math

import pytest
import torch

from trimtab.train import selftest
from trimtab.train.selftest import GROUPS, GUARD, LOSSES, MONITOR, Group, Part, SelfTestError, available, run_selftest


def outcome(group: Group) -> dict[str, str]:
    return {r.name: r.problem for r in run_selftest([group], ["cpu"])}


def test_a30_every_part_passes_and_tells_the_norms():
    results = list(run_selftest(devices=["cpu"]))
    assert [r.problem for r in results if not r.passed] == []
    assert len(results) == sum(len(g.parts) for g in GROUPS) >= 11
    healthy = results[0]
    assert healthy.heading == "Testing Gradient Health Monitor"
    assert list(healthy.facts) == ["Global norm", "Max norm", "Min norm", "Has NaN", "Has Inf"]
    assert (healthy.facts["Has NaN"], healthy.facts["Has Inf"]) == (False, False)
    assert {r.name: r.facts for r in results}["NaN update rejected, Adam"]["Rejected"] == 1


@pytest.mark.parametrize(
    ("change", "failing"),
    [
        ({"has_nan": False, "has_inf": False}, {"NaN in a gradient", "Inf in a gradient"}),
        (
            {"recommendations": []},
            {"NaN in a gradient", "Inf in a gradient", "vanishing gradients", "exploding gradients"},
        ),
        ({"global_grad_norm": 7.0}, {"healthy gradients"}),
        ({"params_with_grads": 1}, {"healthy gradients"}),
    ],
)
def test_a30_a_monitor_that_lies_is_caught(monkeypatch, change, failing):
    from trimtab.compat.monitors.gradient_monitor import GradientHealthMonitor

    true = GradientHealthMonitor.check_gradients
    monkeypatch.setattr(GradientHealthMonitor, "check_gradients", lambda self: true(self) | change)
    assert {name for name, problem in outcome(MONITOR).items() if problem} == failing


def test_a30_clipping_that_differs_from_torch_is_caught(monkeypatch):
    from trimtab.compat.monitors.gradient_monitor import GradientHealthMonitor

    def wrong(self, max_norm=1.0):
        return float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.9 * max_norm))

    monkeypatch.setattr(GradientHealthMonitor, "apply_gradient_clipping", wrong)
    assert "differ from torch" in outcome(MONITOR)["clipping as torch does it"]


def test_a30_a_guard_that_lets_nan_through_is_caught(monkeypatch):
    from trimtab.guard.guard import Guard

    def careless(self, loss, batch=None, *, optimizer=None):
        for one in self._optimizers.values():
            torch.optim.Optimizer.step  # noqa: B018
            for p in (p for g in one.param_groups for p in g["params"]):
                p.data.add_(p.grad, alpha=-0.1)

    monkeypatch.setattr(Guard, "step", careless)
    found = outcome(GUARD)
    assert "changed" in found["NaN update rejected, SGD"]
    assert all(found.values())


def test_a_part_that_breaks_does_not_end_the_others_and_a_refusal_is_told():
    def broken(device):
        raise ZeroDivisionError("oh")

    def failing(device):
        raise SelfTestError("not as promised")

    parts = (Part(name="a", body=broken), Part(name="b", body=failing), Part(name="c", body=lambda d: {"on": d.type}))
    a, b, c = run_selftest([Group(heading="Testing", parts=parts)], ["cpu"])
    assert (a.passed, a.problem) == (False, "ZeroDivisionError: oh")
    assert (b.passed, b.problem) == (False, "not as promised")
    assert (c.passed, c.facts) == (True, {"on": "cpu"})


def test_it_leaves_the_seed_and_the_log_as_they_were(caplog):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(run_selftest(devices=["cpu"]))
    assert torch.equal(before, torch.get_rng_state())
    assert logging.getLogger("trimtab").level == logging.NOTSET
    assert caplog.records == []


def test_the_accelerator_is_tried_too(monkeypatch):
    assert available()[0] == "cpu"
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert available() == ["cpu", "meta"]
    devices = {r.device for r in run_selftest([Group(heading="", parts=(Part(name="", body=lambda d: {}),))])}
    assert devices == {"cpu", "meta"}


def test_what_is_injected_is_really_injected(monkeypatch):
    from trimtab.train import selftest as selftest_monitor

    assert math.isnan(selftest_monitor._checked(torch.device("cpu"), spoil=math.nan)["global_grad_norm"])
    assert selftest.GROUPS == (MONITOR, GUARD, LOSSES)
