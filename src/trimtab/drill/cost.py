"""What a guard costs on this training: guarded and unguarded steps in turn, in one process."""

from __future__ import annotations

import time
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
    times: tuple[list[float], list[float]] = ([], [])
    for run in runs:
        run.begin()
    try:
        for step in range(WARM_UP + task.num_steps):
            for which in (0, 1) if step % 2 else (1, 0):
                seconds = _timed(runs[which], step)
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
        seconds=time.perf_counter() - began,
    )


def _timed(run: Run, step: int) -> float:
    run.step = step
    began = time.perf_counter()
    run.one_step()
    if next(run.model.parameters()).is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    run.unlisten()  # or it would hear the other run, too
    return seconds
