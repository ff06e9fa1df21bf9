"""What the machine does meanwhile: the clock, the share of time spent waiting for data, memory and load of the GPU.

Nothing here waits for a device: memory is what the allocator has counted, and the load is what the driver reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

EVERY = 10
"""Steps between two looks at the clock."""
GPU_EVERY_S = 1.0
"""Seconds between two questions to the GPU: its driver averages over about as long."""

NAMES = ("clock", "data_wait", "gpu_memory", "gpu_memory_peak", "gpu_utilisation")
"""What is added; no rule reads it, because no two runs have it alike."""

Ask = Callable[[], dict[str, float]]


class Resources:
    """Adds to the numbers of every tenth step how long the run has taken, and what it did with the time.

    `data_wait` is the share of the time between two looks that lies between the end of a step and the first forward
    pass after it: loading data, and whatever else the loop does there. It is unknown at the first look, and where no
    forward pass was seen.
    """

    def __init__(self, ask_gpu: Ask | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._ask_gpu = clock, ask_gpu
        self._start_s = clock()
        self._asked_s = self._start_s - GPU_EVERY_S
        self._ended_s = self._waited_s = 0.0
        self._num_waits = 0
        self._looks: dict[str, tuple[float, float, int]] = {}

    def step_ended(self) -> None:
        """From now on the loop fetches its next batch."""
        self._ended_s = self._clock()

    def forward_begins(self) -> None:
        """It has it."""
        if self._ended_s:
            self._waited_s += self._clock() - self._ended_s
            self._ended_s = 0.0
            self._num_waits += 1

    def add_to(self, scalars: MutableMapping[str, float | Tensor], label: str) -> None:
        """Add what is known now to a step of the optimizer `label`; numbers that the loop told itself stay."""
        now_s = self._clock()
        scalars.setdefault("clock", now_s - self._start_s)
        before_s, waited_s, num_waits = self._looks.get(label, (now_s, 0.0, 0))
        if now_s > before_s and self._num_waits > num_waits:
            scalars.setdefault("data_wait", min((self._waited_s - waited_s) / (now_s - before_s), 1.0))
        self._looks[label] = now_s, self._waited_s, self._num_waits
        if self._ask_gpu is not None and now_s - self._asked_s >= GPU_EVERY_S:
            self._asked_s = now_s
            for name, value in self._ask_gpu().items():
                scalars.setdefault(name, value)


def gpu_of(device: torch.device) -> Ask | None:
    """A function that asks the accelerator `device` for its memory in bytes and its load; None where there is none."""
    if device.type in ("cpu", "meta"):
        return None
    try:
        module: Any = torch.get_device_module(device)
    except (RuntimeError, AttributeError):
        return None
    of_device = hasattr(module, "memory_allocated")  # else there is only one
    counted = {
        "gpu_memory": "memory_allocated" if of_device else "current_allocated_memory",
        "gpu_memory_peak": "max_memory_allocated",
        "gpu_utilisation": "utilization",
    }
    known = {name: getattr(module, call) for name, call in counted.items() if hasattr(module, call)}

    def ask() -> dict[str, float]:
        found = {}
        for name, one in list(known.items()):
            try:
                number = float(one(device) if of_device else one())
                found[name] = number / 100.0 if name == "gpu_utilisation" else number
            except Exception:  # no driver library, no right to ask, a virtual GPU: then it stays unknown
                del known[name]
        return found

    return ask if known else None
