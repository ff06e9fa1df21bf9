"""A learning rate for a training: sweeps say where to look, short trainings at a few rates which of them is best.

A sweep raises the rate from step to step, several times from the same start. A trial trains at a few constant rates,
all from the same start on the same batches. Afterwards all is put back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim import Optimizer

from trimtab.core.errors import InputError
from trimtab.doctor.target import Target, compute_loss, endless, take_step
from trimtab.torchutil.optimizers import needs_closure, rates_of
from trimtab.torchutil.undo import untouched

MIN_GAIN = 0.01
"""A loss that fell by less than this part of itself has not fallen."""
MARGIN, EDGE = 3.0, 20.0
"""How far below the best rate of a sweep, and below the one at which it left, a whole training should stay: a sweep is
at a rate for one step only, and so bears more than a training does."""
FAINT, LONGER = 0.12, 4
"""Where no short training fell by more than this part of the loss, all of them may sit where the model only guesses
better than at the start; they are made this many times longer, to see which one leaves that."""
USEFUL = 0.25
"""A rate whose short training fell by this part less than the best one's is still worth trying."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LrRange:
    """What the sweeps say: a rate to use, the range to look in, and where the loss falls fastest, is best, and leaves.

    `suggested` is None, and `reason` says why, where the loss fell nowhere. `trials` are the rates that were tried in
    short trainings, and how far the loss fell in each.
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
    trials: Mapping[float, float]
    num_sweeps: int
    num_steps: int


def find_lr(
    target: Target,
    *,
    low: float = 1e-7,
    high: float = 10.0,
    num_steps: int = 100,
    repeats: int = 3,
    trial_steps: int = 50,
) -> LrRange:
    """Suggest a learning rate. Model, optimizer, RNG and loader are restored bit-identically afterwards.

    Example:
        >>> import torch
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
    found = suggest_lr(sweep_rates(target, low=low, high=high, num_steps=num_steps, repeats=repeats))
    guess = found.suggested
    if guess is None or not trial_steps:
        return found
    bound = high if found.diverged is None else found.diverged / MARGIN
    trials = try_rates(target, guess, low=low, high=bound, num_steps=trial_steps)
    if max(trials.values()) < FAINT * abs(found.start):
        found = replace(found, num_steps=found.num_steps + trial_steps * len(trials))
        trial_steps *= LONGER
        trials = try_rates(target, guess, low=low, high=bound, num_steps=trial_steps)
    return settle(found, trials, trial_steps)


def settle(found: LrRange, trials: Mapping[float, float], num_steps: int) -> LrRange:
    """Choose among the rates that were tried: the middle of those that did as well as the best."""
    extended = replace(found, trials=trials, num_steps=found.num_steps + num_steps * len(trials))
    fell = max(trials.values(), default=0.0)
    if not fell > 0:
        return extended
    good = [rate for rate, by in trials.items() if by >= (1.0 - CLOSE) * fell]
    useful = [rate for rate, by in trials.items() if by >= (1.0 - USEFUL) * fell]
    middle = math.exp(sum(map(math.log, good)) / len(good))
    return replace(extended, suggested=middle, low=min(useful), high=max(useful))


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
        "trials": {},
        "num_sweeps": len(sweeps),
        "num_steps": sum(len(s.losses) for s in sweeps),
    }
    if at < 2 or gained <= max(MIN_GAIN * abs(start), CHANCE * wobble(mean[: at + 1])):
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


MEMORY = 0.8
"""Share of the smoothed loss that is kept from step to step: it averages about five steps."""
MIN_STEPS = 20
POOL = 32
"""Batches of one sweep, gone through in turn: for each of them it is known what its loss was at the start."""
SOONEST = 8
CHANCE = 9.0
"""A smoothed curve of pure noise wanders by this many of its usual steps within a hundred of them."""


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


def start_loss(target: Target, batch: object) -> float:
    """The loss of this batch before training: batches differ more than early steps do."""
    with torch.no_grad():
        value = float(compute_loss(target, batch))
    if not math.isfinite(value):
        raise InputError(f"the loss is {value} before the first step; expected a finite one: look at the data first")
    return value


def _sweep(target: Target, rates: NDArray[np.float64], pool: list[tuple[object, float]]) -> Sweep:
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
    """Whether the loss has diverged: it is above the start by more than twice what was ever gained.

    Only differences count, so that it does not matter what the smallest possible loss is.
    """
    if len(smooth) < SOONEST:
        return False
    best, now = min(*smooth, start), smooth[-1]
    return now > start + max(2.0 * (start - best), 0.1 * abs(start), CHANCE * wobble(smooth))


def wobble(smooth: Sequence[float] | NDArray[np.float64]) -> float:
    """How much a curve usually changes from step to step: most of a sweep is at rates at which nothing is learned."""
    return float(np.median(np.abs(np.diff(smooth)))) if len(smooth) > 1 else 0.0


def _check_optimizer(optimizer: Optimizer) -> None:
    name = type(optimizer).__name__
    if needs_closure(optimizer):
        raise InputError(
            f"{name} needs a closure and evaluates it as often as it likes; a sweep needs one step at a time"
        )
    for group in optimizer.param_groups:
        if not isinstance(group.get("lr"), int | float | torch.Tensor):
            raise InputError(f"{name} has the learning rate {group.get('lr')!r}; expected a number that can be swept")


def shares_of(target: Target) -> list[list[float]]:
    """The rate of every group relative to the highest one; equal where all are 0."""
    rates = [rates_of(one, wait=True) for one in target.optimizers]
    top = max((r for some in rates for r in some), default=0.0)
    return [[r / top if top > 0 else 1.0 for r in some] for some in rates]


def set_rates(target: Target, shares: list[list[float]], rate: float) -> None:
    """Give every group its share of a rate."""
    for one, parts in zip(target.optimizers, shares, strict=True):
        for group, share in zip(one.param_groups, parts, strict=True):
            old = group["lr"]
            group["lr"] = torch.full_like(old, rate * share) if isinstance(old, torch.Tensor) else rate * share


APART = 3.0
"""Factor between neighbouring rates."""
MOST = 9
"""No further rates are added after this many trials."""
CLOSE = 0.05
"""A loss that fell by this share less than the best is as good: noise makes more difference."""
TRIAL_POOL = 64
END_FRAC = 0.3


def try_rates(target: Target, middle: float, *, low: float, high: float, num_steps: int) -> dict[float, float]:
    """How far the loss fell in short trainings at rates around `middle`; the ladder grows towards the better end."""
    with untouched(target) as rewind:
        pool = list(islice(endless(target), min(num_steps, TRIAL_POOL)))
        rewind()
        known = [(batch, start_loss(target, batch)) for batch in pool]

        def trial(rate: float) -> float:
            rewind()
            return _fell(target, rate, [known[i % len(known)] for i in range(num_steps)])

        return climb(trial, middle, low=low, high=high)


def climb(trial: Callable[[float], float], middle: float, *, low: float, high: float) -> dict[float, float]:
    """Try the middle and its neighbours, then further ones on either side as long as the last there is among the best.

    Example:
        >>> found = climb(lambda rate: 1.0 - math.log10(rate) ** 2, 0.1, low=1e-6, high=10.0)
        >>> [round(rate, 2) for rate in found]
        [0.03, 0.1, 0.3, 0.9, 2.7]
    """
    found: dict[float, float] = {}
    rates = [r for r in (middle / APART, middle, middle * APART) if low <= r <= high] or [middle]
    while rates and len(found) < MOST:
        found |= {rate: trial(rate) for rate in rates}
        good = (1.0 - CLOSE) * max(found.values())
        ends = [(max(found), APART), (min(found), 1.0 / APART)]
        rates = [end * factor for end, factor in ends if found[end] >= good > 0 and low <= end * factor <= high]
    return dict(sorted(found.items()))


def _fell(target: Target, rate: float, known: list[tuple[object, float]]) -> float:
    """How far the loss is below the start's on the same batches, at the end of a short training; -inf if it broke."""
    set_rates(target, shares_of(target), rate)
    gains: list[float] = []
    for batch, start in known:
        loss = compute_loss(target, batch)
        value = float(loss.detach())
        if not math.isfinite(value):
            return -math.inf
        gains.append(start - value)
        take_step(target, loss)
    last = gains[-max(int(END_FRAC * len(gains)), 1) :]
    return sum(last) / len(last)
