"""What a guard costs on this training: guarded and unguarded steps in turn, in one process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch

from trimtab.checks.target import Target
from trimtab.drill.one_run import Run
from trimtab.drill.outcome import Result, Task

WARM_UP = 8
MAX_S = 40.0


def measure_cost(bare: Target, watched: Target, task: Task) -> Result:
    """The median of guarded steps over that of unguarded ones; each pair in the other order than the one before."""
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
    unguarded, guarded = median(times[0]), median(times[1])
    return Result(
        cost_percent=100.0 * (guarded / unguarded - 1.0),
        step_ms=1e3 * unguarded,
        cpu_time=busy,
        seconds=time.perf_counter() - began,
    )


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
