"""Runs a case on a family with a guard attached, and says whether the run was harmed."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.faults.base import STEPS, Case, Run, on_device
from tests.faults.families import FAMILIES
from tests.faults.inject import rebuild
from trimtab import Guard

HARM = 1.25
GIVEN_BACK = 0.25  # of the clean run's gain: text that falls back to letter frequencies is within 1.25 of a good model


def make_run(case: Case, family: str, seed: int, *, device: str = "cpu", fused: bool = False) -> Run:
    """A run that is about to begin; every source of chance is seeded.

    Weights and data are made on the host and then moved, so that they are the same on every device. `fused` asks for an
    optimizer that decides on the device, where the family's has such a form.
    """
    torch.manual_seed(seed)
    np.random.seed(seed)
    run = Run(FAMILIES[family](seed), case, seed, device)
    run.model.to(run.device)
    run.task.loss = on_device(run.task.loss, run.device)
    if fused and "fused" in run.optimizer.defaults:
        rebuild(run, fused=True)
    torch.manual_seed(seed)  # dropout must not depend on how many numbers the model took
    return run


def run_case(
    case: Case,
    family: str,
    seed: int,
    *,
    mode: str = "observe",
    device: str = "cpu",
    fused: bool = False,
    **guard_kwargs: Any,
) -> Run:
    """Train a case with a guard on it: `run.guard.findings` is what it found."""

    def attach(run: Run) -> Guard:
        settings = {"mode": mode} | case.config
        kwargs = {"run_dir": False, "loader": run.extra.get("loader")} | guard_kwargs
        return Guard.attach(run.model, run.optimizer, settings, scaler=run.scaler, ema=run.ema, **kwargs)

    return make_run(case, family, seed, device=device, fused=fused).train(attach)


def run_unguarded(case: Case, family: str, seed: int) -> Run:
    """Train a case with nobody watching."""
    return make_run(case, family, seed).train(lambda run: None)


@cache
def clean_losses(family: str, seed: int, steps: int = STEPS) -> tuple[float, ...]:
    """The losses of the same family and seed where nothing is wrong."""
    return tuple(run_unguarded(Case("clean", "healthy", steps=steps), family, seed).losses)


def end_loss(losses: list[float] | tuple[float, ...]) -> float:
    """The mean of the last ten losses."""
    return sum(losses[-10:]) / max(len(losses[-10:]), 1)


def harmful(run: Run) -> bool:
    """Whether the run ended clearly worse than a clean one, or not at all, or is of a kind that always hurts."""
    if run.case.always_harmful or "error" in run.extra or run.harmed:
        return True
    end, clean = end_loss(run.losses), clean_losses(run.task.family, run.seed, run.case.steps)
    good = end_loss(clean)
    return not math.isfinite(end) or end > min(HARM * good, good + GIVEN_BACK * (clean[0] - good))
