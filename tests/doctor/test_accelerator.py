"""What an accelerator does differently, played on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from tests.doctor.kit import line, look, sound
from trimtab.doctor import observed_step, repeatability
from trimtab.doctor.checklist import Status
from trimtab.doctor.checks import not_reproducible
from trimtab.doctor.checks.label_range import out_of_range
from trimtab.doctor.loader_scan import Leaf
from trimtab.doctor.probe import Probe

ASSERTED = "CUDA error: device-side assert triggered"


@pytest.fixture
def reorders(monkeypatch):
    """The device adds in any order."""
    for module in (observed_step, not_reproducible, repeatability):
        monkeypatch.setattr(module, "may_reorder", lambda device: True)


def noisy(size, *, unless_ordered):
    """A loss with an unseeded error."""
    count = iter(range(10**9))

    def loss_fn(output, target):
        loss = cross_entropy(output, target)
        quiet = unless_ordered and torch.are_deterministic_algorithms_enabled()
        return loss if quiet else loss * (1.0 + size * next(count))

    return loss_fn


def test_e12_sums_in_any_order_are_no_alarm_where_a_fixed_order_agrees(reorders):
    report = look(sound(loss_fn=noisy(1e-7, unless_ordered=True)))
    told = line(report, "not-reproducible")
    assert told.status is Status.PASS
    assert "fixed order" in told.evidence
    assert line(report, "resume-differs").status is Status.PASS


def test_e12_rounding_that_no_order_cures_is_let_pass_on_a_gpu_alone(reorders):
    assert line(look(sound(loss_fn=noisy(1e-9, unless_ordered=False))), "not-reproducible").status is Status.PASS


def test_e12_noise_without_a_seed_is_still_named_on_a_gpu(reorders):
    assert line(look(sound(loss_fn=noisy(1e-3, unless_ordered=False))), "not-reproducible").status is Status.FAIL


def test_e12_a_lost_moment_is_still_named_on_a_gpu(reorders):
    class Forgetful(torch.optim.Adam):
        def load_state_dict(self, state_dict):
            super().load_state_dict({**state_dict, "state": {}})

    model = sound()["model"]
    report = look(sound(model=model, optimizer=Forgetful(model.parameters(), lr=1e-2)))
    assert line(report, "resume-differs").status is Status.FAIL


def test_e12_the_switches_for_a_fixed_order_are_put_back(reorders):
    before = (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic)
    with observed_step.in_order(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic) == before


def test_e12_an_assertion_in_a_kernel_is_named_label_range():
    def loss_fn(output, target):
        raise RuntimeError(ASSERTED)

    broken = sound(loss_fn=loss_fn)
    broken["loader"] = [(x, y + 3) for x, y in broken["loader"]]
    told = line(look(broken), "label-range")
    assert told.status is Status.FAIL
    assert "tensor 1 of the batch goes from 3 to 5" in told.evidence
    assert told.subject == ("1",)


def test_e12_a_gpu_that_has_failed_still_gives_a_list(monkeypatch):
    def lost(self):
        raise RuntimeError(ASSERTED)

    monkeypatch.setattr(Probe, "_observe", lost)
    broken = sound()
    broken["loader"] = [(x, y - 1) for x, y in broken["loader"]]
    report = look(broken)
    assert [one.name for one in report.of(Status.FAIL)] == ["label-range"]
    assert "from -1 to 1" in line(report, "label-range").evidence
    assert "the GPU has failed" in line(report, "not-learning").evidence


def test_e12_other_errors_of_the_probe_are_not_swallowed(monkeypatch):
    def breaks(self):
        raise RuntimeError("something else")

    monkeypatch.setattr(Probe, "_observe", breaks)
    with pytest.raises(RuntimeError, match="something else"):
        look(sound())


def test_tokens_are_held_against_every_table():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 4)
            self.head = nn.Linear(4, 7)

    leaf = Leaf("0", torch.int64, (3,), torch.device("cpu"), counts={0: 1, 6: 1})
    assert out_of_range(Reader(), {"0": leaf}) == []  # 6 may be one of seven classes
    leaf.counts[7] = 1
    assert [path for path, _ in out_of_range(Reader(), {"0": leaf})] == ["0"]
