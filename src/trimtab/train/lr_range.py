"""The learning-rate range test: sweep the rate upwards, watch where the loss falls and where it leaves."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trimtab.core.errors import InputError
from trimtab.train.target import Target
from trimtab.train.target_steps import compute_loss, endless, take_step
from trimtab.train.untouched import untouched

MEMORY = 0.8
"""Share of the smoothed loss that is kept from step to step: it averages about five steps."""
MIN_STEPS = 20
POOL = 32
"""Batches of one sweep, gone through in turn: for each of them it is known what its loss was at the start."""
MIN_GAIN = 0.01
"""A loss that fell by less than this part of itself has not fallen."""
SOONEST = 8
CHANCE = 9.0
"""Nor one that fell by less than so many of its usual steps: pure noise, smoothed, wanders as far in a hundred."""
MARGIN, EDGE = 3.0, 20.0
"""How far below the best rate of a sweep, and below the one at which it left, a whole training should stay: a sweep is
at a rate for one step only, and so bears more than a training does."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRange:
    """What the sweeps say: a rate to use, the range to look in, and where the loss falls fastest, is best, and leaves.

    `suggested` is None, and `reason` says why, where the loss fell nowhere.
    """

    suggested: float | None
    low: float | None
    high: float | None
    steepest: float | None
    best: float | None
    diverged: float | None
    start: float
    reason: str
    rates: tuple[float, ...]
    losses: tuple[float, ...]
    num_sweeps: int
    num_steps: int


Progress = Callable[[int, int, float, float], None]


def find_lr(
    target: Target,
    *,
    low: float = 1e-7,
    high: float = 10.0,
    num_steps: int = 100,
    repeats: int = 3,
    progress: Progress | None = None,
) -> LrRange:
    """Sweep the rate, and suggest one. Model, optimizer, RNG and loader are afterwards what they were, to the bit.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> x = torch.randn(64, 2)
        >>> target = Target(
        ...     model=model,
        ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        ...     loader=[(x, x.sum(1, keepdim=True))],
        ...     loss_fn=torch.nn.functional.mse_loss,
        ... )
        >>> found = find_lr(target)
        >>> 1e-3 < found.suggested < 1.0
        True
    """
    sweeps = sweep_rates(target, low=low, high=high, num_steps=num_steps, repeats=repeats, progress=progress)
    return suggest_lr(sweeps)


def sweep_rates(
    target: Target, *, low: float, high: float, num_steps: int, repeats: int, progress: Progress | None = None
) -> tuple[Sweep, ...]:
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
        for number in range(repeats):
            pool = list(islice(batches, POOL))
            rewind()
            start = [_start_loss(target, batch) for batch in pool]
            rewind()  # the look at the start may have moved the statistics of normalisation layers
            sweeps.append(_sweep(target, rates, list(zip(pool, start, strict=True)), _numbered(progress, number)))
    return tuple(sweeps)


def _start_loss(target: Target, batch: Any) -> float:
    """What the loss of this batch is before anything was learned: batches differ more than early steps do."""
    with torch.no_grad():
        value = float(compute_loss(target, batch))
    if not math.isfinite(value):
        raise InputError(f"the loss is {value} before the first step; expected a finite one: look at the data first")
    return value


def _sweep(
    target: Target,
    rates: NDArray[np.float64],
    pool: list[tuple[Any, float]],
    progress: Callable[[int, float, float], None],
) -> Sweep:
    shares = _shares(target)
    usual = sum(start for _, start in pool) / len(pool)
    losses: list[float] = []
    smooth: list[float] = []
    average, diverged = 0.0, False
    for step, rate in enumerate(rates):
        _set_rates(target, shares, float(rate))
        batch, start = pool[step % len(pool)]
        loss = compute_loss(target, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            diverged = True
            break
        losses.append(value)
        average = MEMORY * average + (1.0 - MEMORY) * (value - start)
        smooth.append(usual + average / (1.0 - MEMORY ** (step + 1)))  # the average began at 0: corrected for that
        progress(step, float(rate), smooth[-1])
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
    return now > start + max(2.0 * (start - best), 0.1 * abs(start), CHANCE * _wobble(smooth))


def suggest_lr(sweeps: Sequence[Sweep]) -> LrRange:
    """Read the mean of several sweeps: where it falls fastest, where it is lowest, where it leaves."""
    num = min(len(s.rates) for s in sweeps)  # as far as all of them came
    rates = np.array(max(sweeps, key=lambda s: len(s.rates)).rates)
    each = np.array([s.smooth[:num] for s in sweeps])
    mean = each.mean(axis=0)
    left = [s.rates[-1] for s in sweeps if s.diverged and s.rates]
    diverged = min(left) if left else None
    at = int(np.argmin(mean)) if num else 0
    start = sum(s.start for s in sweeps) / len(sweeps)
    gained = start - float(mean[at]) if num else 0.0
    facts: dict[str, Any] = {
        "diverged": diverged,
        "start": start,
        "rates": tuple(float(r) for r in rates[:num]),
        "losses": tuple(float(v) for v in mean),
        "num_sweeps": len(sweeps),
        "num_steps": sum(len(s.losses) for s in sweeps),
    }
    if at < 2 or gained <= max(MIN_GAIN * abs(start), CHANCE * _wobble(mean[: at + 1])):
        where = f"between {rates[0]:.2g} and {rates[num - 1]:.2g}" if num else "and was not finite at the first step"
        reason = f"the loss fell nowhere {where}"
        return LrRange(suggested=None, low=None, high=None, steepest=None, best=None, reason=reason, **facts)
    slope = np.gradient(mean)
    steepest, best = float(rates[int(np.argmin(slope[: at + 1]))]), float(rates[at])
    ceiling = best / MARGIN if diverged is None else min(best / MARGIN, diverged / EDGE)
    suggested = min(math.sqrt(steepest * best / 10.0), ceiling)
    begins = int(np.argmax(mean < start - 0.1 * gained))
    reason = (
        f"the loss fell from {start:.3g} to {mean[at]:.3g} on the way up, fastest at {steepest:.2g}, to its best at "
        f"{best:.2g}" + (f", and left at {diverged:.2g}" if diverged is not None else "")
    )
    return LrRange(
        suggested=suggested,
        low=min(float(rates[begins]), suggested / 3.0),
        high=max(best / MARGIN, suggested),
        steepest=steepest,
        best=best,
        reason=reason,
        **facts,
    )


def _wobble(smooth: Sequence[float] | NDArray[np.float64]) -> float:
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


def _shares(target: Target) -> list[list[float]]:
    """The rate of every group relative to the highest one; equal where all are 0."""
    rates = [[float(g["lr"]) for g in one.param_groups] for one in target.optimizers]
    top = max((r for some in rates for r in some), default=0.0)
    return [[r / top if top > 0 else 1.0 for r in some] for some in rates]


def _set_rates(target: Target, shares: list[list[float]], rate: float) -> None:
    for one, parts in zip(target.optimizers, shares, strict=True):
        for group, share in zip(one.param_groups, parts, strict=True):
            old = group["lr"]
            group["lr"] = torch.full_like(old, rate * share) if isinstance(old, torch.Tensor) else rate * share


def _numbered(progress: Progress | None, number: int) -> Callable[[int, float, float], None]:
    return lambda step, rate, loss: progress(number, step, rate, loss) if progress is not None else None
