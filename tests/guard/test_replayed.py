"""Steps captured in CUDA graphs, on the CPU: a stand-in for the ring on the device is filled by hand."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from trimtab import Guard
from trimtab.core.types import Sample
from trimtab.guard.protect import Judge
from trimtab.sample.measure.reference import GLOBALS
from trimtab.sample.transfer import Replays

NUM_PLACES = 8


class Device:
    """Where replays leave one row: the norm of one gradient, what the device decided, the loss."""

    def __init__(self) -> None:
        self.ring = torch.zeros(NUM_PLACES, 1 + len(GLOBALS) + 2)
        self.counter = torch.zeros(1, dtype=torch.int64)
        self.replays = Replays(self.ring, self.counter, 1)
        self.replays.add((*GLOBALS, "loss"))

    def replay(self, norm: float, loss: float) -> None:
        bad = float(norm != norm)
        row = torch.tensor([norm, norm, bad, bad, 1.0, 1.0, loss, 0.0])
        self.ring[int(self.counter) % NUM_PLACES] = row
        self.counter += 1


class Kept:
    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def write(self, record: object) -> None:
        if isinstance(record, Sample):
            self.samples.append(record)

    def close(self) -> None:
        pass


class Captured:
    """A guarded model of one weight, three steps, and a step that was captured after them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.device, self.kept = Device(), Kept()
        self.model = nn.Linear(4, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125)
        self.guard = Guard(self.model, self.optimizer, run_dir=False, sinks=[self.kept], lag=1)
        (self.lane,) = self.guard.lanes.values()
        for _ in range(3):
            self.step()
        decide = Judge.decide

        def captured(judge: Judge, step: Any, rows: Any) -> None:
            decide(judge, step, rows)
            step.captured = True

        monkeypatch.setattr(Judge, "replays", self.device.replays)
        monkeypatch.setattr(Judge, "decide", captured)
        self.lane._rows.on_host = False  # what a device decided is told in its own words
        self.step()
        monkeypatch.setattr(Judge, "decide", decide)

    def step(self) -> None:
        loss = self.model(torch.randn(8, 4)).square().mean()
        loss.backward()
        self.guard.step(loss)
        self.optimizer.zero_grad()


def test_replays_are_steps_and_the_capture_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Captured(monkeypatch)
    assert run.lane.attempts == 3
    run.device.replay(0.5, 2.0)
    run.device.replay(0.25, 1.0)
    run.guard.observe()
    assert run.lane.attempts == 5
    run.device.replay(float("nan"), float("nan"))
    run.guard.close()
    assert run.lane.attempts == 6
    assert [s.step for s in run.kept.samples] == list(range(6))
    for sample, norm, loss in zip(run.kept.samples[3:5], (0.5, 0.25), (2.0, 1.0), strict=True):
        assert sample.table.tolist() == [[norm]]
        assert (sample.scalars["grad_norm"], sample.scalars["loss"]) == (norm, loss)
        assert sample.scalars["lr/0"] == 0.125
    assert run.guard.rejected == 1
    assert {f.step for f in run.guard.findings} == {5}
    assert {f.name for f in run.guard.findings} == {"nonfinite-loss", "nonfinite-gradient"}


def test_replays_that_nobody_came_by_for_are_counted_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Captured(monkeypatch)
    for i in range(NUM_PLACES + 2):
        run.device.replay(1.0 + i, 2.0)
    with caplog.at_level(logging.WARNING, "trimtab"):
        run.guard.close()
    assert run.lane.attempts == 3 + NUM_PLACES + 2
    assert [s.step for s in run.kept.samples] == [0, 1, 2, *range(5, 5 + NUM_PLACES)]
    assert [r.getMessage() for r in caplog.records if "2 steps replayed" in r.getMessage()]


def test_a_validation_comes_after_the_steps_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Captured(monkeypatch)
    run.device.replay(0.5, 2.0)
    run.guard.validate(1.5)
    run.guard.close()
    assert [(s.step, s.phase) for s in run.kept.samples] == [
        (0, "train"),
        (1, "train"),
        (2, "train"),
        (3, "train"),
        (3, "val"),
    ]
