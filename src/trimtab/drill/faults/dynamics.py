"""Faults of the dynamics: rates, scales and signs that make training diverge or stand still."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trimtab.drill.injection import TOO_FAST, alter, around_step, fault, on_gradient, ours_only, scale_lr, trained
from trimtab.drill.score import Fault
from trimtab.drill.trial import Run

DYNAMICS: list[Fault] = []
TOO_SLOW = ("learning-rate", "weights-unchanged", "update-ratio", "not-learning")
DOWNHILL = ("not-learning", "dead-units", "saturated-units", "collapsed-output")
SPIKES = 3


def other_rate(run: Run, factor: Callable[[int], float]) -> None:
    """Take every step at another rate than the schedule's, which does not hear of it."""
    first = run.step
    kept: dict[int, list[Any]] = {}

    def begin(optimizer: Any) -> None:
        kept[id(optimizer)] = [group["lr"] for group in optimizer.param_groups]
        scale_lr(optimizer, factor(run.step - first))

    def end(optimizer: Any) -> None:
        for group, rate in zip(optimizer.param_groups, kept[id(optimizer)], strict=True):
            group["lr"] = rate

    around_step(run, begin, end)


@fault(DYNAMICS, "dynamics", *TOO_FAST, *DOWNHILL)
def rate_30x(run: Run) -> None:
    """The rate is thirty times as high from now on."""
    other_rate(run, lambda num: 30.0)


@fault(DYNAMICS, "dynamics", *TOO_FAST, *DOWNHILL)
def rate_300x(run: Run) -> None:
    """The rate is three hundred times as high from now on."""
    other_rate(run, lambda num: 300.0)


@fault(DYNAMICS, "dynamics", *TOO_FAST, *DOWNHILL)
def rate_grows(run: Run) -> None:
    """The rate grows by a tenth with every step from now on: a schedule with the wrong sign."""
    other_rate(run, lambda num: min(1.1 ** (num + 1), 1e6))


@fault(DYNAMICS, "dynamics", *TOO_SLOW, silent=True)
def rate_zero(run: Run) -> None:
    """The rate is zero from now on: a schedule that has ended too early."""
    other_rate(run, lambda num: 0.0)


@fault(DYNAMICS, "dynamics", "exploding-gradient", *TOO_FAST)
def gradient_spikes(run: Run) -> None:
    """Every gradient is ten thousand times as large, for three steps."""
    on_gradient(run, trained(run), lambda g: g * 1e4, num_steps=SPIKES)


@fault(DYNAMICS, "dynamics", "vanishing-gradient", "zero-gradient", "gradient-underflow", *TOO_SLOW, silent=True)
def gradients_vanish(run: Run) -> None:
    """Every gradient is a billionth of what it was from now on."""
    on_gradient(run, list(run.model.parameters()), lambda g: g * 1e-9)


@fault(DYNAMICS, "dynamics", "diverging-loss", *TOO_FAST)
def sign_flips(run: Run) -> None:
    """The optimizer climbs from now on."""
    on_gradient(run, [p for p in run.model.parameters() if p.requires_grad], torch.neg)


@fault(DYNAMICS, "dynamics", *TOO_FAST, silent=True)
def sum_instead_of_mean(run: Run) -> None:
    """The loss is a sum over 256 samples from now on, no more their mean."""
    ours_only(run)
    alter(run, "forward", lambda loss: loss * 256)
