"""Recording launches as a graph, where it fails: what the loop has of PyTorch must be left as it was."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from trimtab.sample.measure import graphs

DEVICE = torch.device("cuda")


class Captured:
    """Stands for `torch.cuda.CUDAGraph`: notes what is done to it."""

    made: list[Captured]

    def __init__(self) -> None:
        self.done: list[str] = []
        Captured.made.append(self)

    def capture_begin(self, **kwargs: Any) -> None:
        self.done.append("begin")

    def capture_end(self) -> None:
        self.done.append("end")


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    Captured.made = []
    for name in ("device", "stream", "Stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def test_a_capture_that_fails_is_ended_and_followed_by_one_that_records_nothing() -> None:
    def launch() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    assert graphs.recorded(DEVICE, launch) is None
    assert [graph.done for graph in Captured.made] == [["begin", "end"]] * 2


def test_inside_a_capture_of_the_loop_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert graphs.recorded(DEVICE, lambda: None) is None
    assert Captured.made == []


def test_where_even_that_fails_nothing_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Captured, "capture_begin", lambda self, **kwargs: 1 / 0)
    assert graphs.recorded(DEVICE, lambda: None) is None
