"""What a guard costs on this training: guarded and unguarded steps in turn, in one process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median

import torch

from trimtab.checks.target import Target
from trimtab.drill.one_run import Run
from trimtab.drill.outcome import Result, Task

WARM_UP = 8
MAX_S = 40.0


def measure_cost(bare: Target, watched: Target, task: Task) -> Result:
    """How much longer guarded steps take than unguarded ones, in pairs, each in the other order than the one before."""
    began = time.perf_counter()
    runs = (Run(bare, replace(task, guarded=False)), Run(watched, task))
    busy = is_busy() and not next(bare.model.parameters()).is_cuda
    clock = time.thread_time if busy else time.perf_counter
    times: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        run.begin()
    try:
        for step in range(WARM_UP + task.num_steps):
            for which in (0, 1) if step % 2 else (1, 0):
                seconds = _timed(runs[which], step, clock)
                if step >= WARM_UP:
                    times[which].append(seconds)
            if time.perf_counter() - began > MAX_S and len(times[0]) >= 5:
                break
    finally:
        for run in runs:
            run.end()
    percent, noise = added_cost(*times)
    return Result(
        cost_percent=percent,
        noise_percent=noise,
        step_ms=1e3 * median(times[0]),
        cpu_time=busy,
        seconds=time.perf_counter() - began,
    )


def added_cost(unguarded: Sequence[float], guarded: Sequence[float]) -> tuple[float | None, float]:
    """What the guard adds to a step, None where these times do not show it, and their noise; both in per cent.

    The difference of each pair counts, and it is only believed where its 95 % interval lies above zero: a guard does
    something, so a cost of zero or less is noise.

    Example:
        >>> percent, noise = added_cost([8.0, 8.0, 9.0, 8.0, 8.0, 7.0], [9.0, 9.0, 10.0, 9.5, 9.0, 8.0])
        >>> percent, noise
        (12.5, 18.75)
        >>> added_cost([8.0, 24.0, 8.0, 8.0, 24.0, 8.0], [8.0, 8.0, 24.0, 8.0, 8.0, 24.0])
        (None, 200.0)
    """
    step = median(unguarded)
    apart = sorted(b - a for a, b in zip(unguarded, guarded, strict=True))
    skip = max(int((len(apart) - 1.96 * math.sqrt(len(apart))) / 2), 0)  # the order statistics around the median
    low, high = apart[skip], apart[-1 - skip]
    return 100.0 * median(apart) / step if low > 0 else None, 100.0 * max(-low, high) / step


def is_busy() -> bool:
    """Whether more wants to run here than there are cores: then a clock on the wall measures the others, too."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return load > (os.cpu_count() or 1)


def _timed(run: Run, step: int, clock: Callable[[], float]) -> float:
    run.step = step
    began = clock()
    run.one_step()
    if next(run.model.parameters()).is_cuda:
        torch.cuda.synchronize()
    seconds = clock() - began
    run.unlisten()  # or it would hear the other run, too
    return seconds
