"""The guard itself records the clock, the share of time spent waiting for data, and what the GPU reports."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trimtab import Guard, Run
from trimtab.guard.resources import EVERY, GPU_EVERY_S, Resources, gpu_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def looked(resources: Resources, label: str = "") -> dict[str, float | Tensor]:
    scalars: dict[str, float | Tensor] = {}
    resources.add_to(scalars, label)
    return scalars


def test_the_share_between_a_step_and_the_next_forward_pass_is_waiting() -> None:
    clock = Clock()
    resources = Resources(clock=clock)
    assert looked(resources) == {"clock": 0.0}  # nothing to compare with yet
    for _ in range(4):
        resources.step_ended()
        clock.now_s += 3.0
        resources.forward_begins()
        resources.forward_begins()  # a second micro-batch: no step ended in between
        clock.now_s += 1.0
    assert looked(resources) == {"clock": 16.0, "data_wait": pytest.approx(0.75)}
    clock.now_s += 5.0
    assert looked(resources) == {"clock": 21.0}  # no forward pass was seen: not 0 %, but unknown
    assert "data_wait" not in looked(resources, "another optimizer")


def test_what_the_loop_told_itself_stays() -> None:
    scalars: dict[str, float | Tensor] = {"clock": 7.0, "gpu_memory": 1.0}
    Resources(lambda: {"gpu_memory": 5.0, "gpu_utilisation": 0.5}).add_to(scalars, "")
    assert scalars == {"clock": 7.0, "gpu_memory": 1.0, "gpu_utilisation": 0.5}


def test_the_gpu_is_asked_once_a_second_at_most() -> None:
    clock, asked = Clock(), []
    resources = Resources(lambda: asked.append(1) or {"gpu_memory": 1.0}, clock)  # type: ignore[func-returns-value]
    for _ in range(10):
        looked(resources)
        clock.now_s += GPU_EVERY_S / 4
    assert len(asked) == 3


def test_a_gpu_that_does_not_report_something_is_not_asked_for_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    class Module:
        @staticmethod
        def memory_allocated(device: torch.device) -> int:
            return 2_000

        @staticmethod
        def max_memory_allocated(device: torch.device) -> int:
            return 3_000

        @staticmethod
        def utilization(device: torch.device) -> int:
            calls.append(device)
            raise ModuleNotFoundError("pynvml")

    monkeypatch.setattr(torch, "get_device_module", lambda device: Module)
    ask = gpu_of(torch.device("cuda", 0))
    assert ask is not None
    for _ in range(3):
        assert ask() == {"gpu_memory": 2_000.0, "gpu_memory_peak": 3_000.0}
    assert len(calls) == 1
    assert gpu_of(torch.device("cpu")) is None


def test_a_run_has_a_clock_and_a_slow_loader_shows(tmp_path: Path) -> None:
    def batches() -> Iterator[Tensor]:
        for _ in range(3 * EVERY):
            time.sleep(0.002)
            yield torch.randn(4, 3)

    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Guard(model, optimizer, run_dir=tmp_path / "run") as guard:
        for batch in batches():
            loss = model(batch).square().mean()
            loss.backward()
            guard.step(loss)
            optimizer.zero_grad()
    run = Run(tmp_path / "run")
    steps, clock = run.series("clock")
    assert steps.tolist() == [0, EVERY, 2 * EVERY]
    assert (clock[1:] > clock[:-1]).all()
    steps, share = run.series("data_wait")
    assert steps.tolist() == [EVERY, 2 * EVERY]
    assert ((share > 0) & (share <= 1)).all()
