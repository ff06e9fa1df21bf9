"""Sweeps of the learning rate: upwards from step to step, several times from the same start; all is put back."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.checks.target import Target
from trimtab.checks.target_steps import compute_loss, endless, take_step
from trimtab.checks.untouched import untouched
from trimtab.core.errors import InputError

MEMORY = 0.8
"""Share of the smoothed loss that is kept from step to step: it averages about five steps."""
MIN_STEPS = 20
POOL = 32
"""Batches of one sweep, gone through in turn: for each of them it is known what its loss was at the start."""
SOONEST = 8
CHANCE = 9.0
"""So many of its usual steps a curve of pure noise, smoothed, wanders in a hundred of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One way up: the rates, the loss at each before its step, and the same smoothed and freed of the batch's share.

    `start` is what it was before the first step, over all batches of the sweep.
    """

    rates: tuple[float, ...]
    losses: tuple[float, ...]
    smooth: tuple[float, ...]
    start: float
    diverged: bool


def sweep_rates(target: Target, *, low: float, high: float, num_steps: int, repeats: int) -> tuple[Sweep, ...]:
    """Sweep from `low` to `high` several times, each from the same start on other batches; nothing stays changed.

    The rate grows by the same factor from step to step. Parameter groups keep their proportions: the rate that is
    swept is that of the group with the highest one.
    """
    if not 0 < low < high < math.inf:
        raise InputError(f"the range is {low:g} to {high:g}; expected 0 < min < max, for example 1e-7 to 10")
    if num_steps < MIN_STEPS or repeats < 1:
        raise InputError(
            f"{repeats} sweeps of {num_steps} steps say too little; expected one or more of at least {MIN_STEPS}"
        )
    for one in target.optimizers:
        _check_optimizer(one)
    rates = np.geomspace(low, high, num_steps)
    with untouched(target) as rewind:
        batches = endless(target)
        sweeps = []
        for _ in range(repeats):
            pool = list(islice(batches, POOL))
            rewind()
            known = [(batch, start_loss(target, batch)) for batch in pool]
            rewind()  # the look at the start may have moved the statistics of normalisation layers
            sweeps.append(_sweep(target, rates, known))
    return tuple(sweeps)


def start_loss(target: Target, batch: Any) -> float:
    """What the loss of this batch is before anything was learned: batches differ more than early steps do."""
    with torch.no_grad():
        value = float(compute_loss(target, batch))
    if not math.isfinite(value):
        raise InputError(f"the loss is {value} before the first step; expected a finite one: look at the data first")
    return value


def _sweep(target: Target, rates: NDArray[np.float64], pool: list[tuple[Any, float]]) -> Sweep:
    shares = shares_of(target)
    usual = sum(start for _, start in pool) / len(pool)
    losses: list[float] = []
    smooth: list[float] = []
    average, diverged = 0.0, False
    for step, rate in enumerate(rates):
        set_rates(target, shares, float(rate))
        batch, start = pool[step % len(pool)]
        loss = compute_loss(target, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            diverged = True
            break
        losses.append(value)
        average = MEMORY * average + (1.0 - MEMORY) * (value - start)
        smooth.append(usual + average / (1.0 - MEMORY ** (step + 1)))  # the average began at 0: corrected for that
        diverged = has_left(smooth, usual)
        if diverged:
            break
        take_step(target, loss)
    used = tuple(float(r) for r in rates[: len(losses)])
    return Sweep(rates=used, losses=tuple(losses), smooth=tuple(smooth), start=usual, diverged=diverged)


def has_left(smooth: Sequence[float], start: float) -> bool:
    """Whether the loss is so far above its best that it is not coming back: by more than twice what was ever gained.

    It is told by differences, so that it does not matter what the smallest possible loss is.
    """
    if len(smooth) < SOONEST:
        return False
    best, now = min(*smooth, start), smooth[-1]
    return now > start + max(2.0 * (start - best), 0.1 * abs(start), CHANCE * wobble(smooth))


def wobble(smooth: Sequence[float] | NDArray[np.float64]) -> float:
    """How much a curve usually changes from step to step: most of a sweep is at rates at which nothing is learned."""
    return float(np.median(np.abs(np.diff(smooth)))) if len(smooth) > 1 else 0.0


def _check_optimizer(optimizer: Any) -> None:
    name = type(optimizer).__name__
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise InputError(
            f"{name} needs a closure and evaluates it as often as it likes; a sweep needs one step at a time"
        )
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), int | float | torch.Tensor):
            raise InputError(f"{name} has the learning rate {group.get('lr')!r}; expected a number that can be swept")


def shares_of(target: Target) -> list[list[float]]:
    """The rate of every group relative to the highest one; equal where all are 0."""
    rates = [[float(g["lr"]) for g in one.param_groups] for one in target.optimizers]
    top = max((r for some in rates for r in some), default=0.0)
    return [[r / top if top > 0 else 1.0 for r in some] for some in rates]


def set_rates(target: Target, shares: list[list[float]], rate: float) -> None:
    """Give every group its share of a rate."""
    for one, parts in zip(target.optimizers, shares, strict=True):
        for group, share in zip(one.param_groups, parts, strict=True):
            old = group["lr"]
            group["lr"] = torch.full_like(old, rate * share) if isinstance(old, torch.Tensor) else rate * share
