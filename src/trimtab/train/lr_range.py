"""A learning rate for a training: sweeps say where to look, short trainings at a few rates which of them is best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trimtab.checks.target import Target
from trimtab.train.lr_sweep import CHANCE, Sweep, sweep_rates, wobble
from trimtab.train.lr_trial import CLOSE, try_rates

MIN_GAIN = 0.01
"""A loss that fell by less than this part of itself has not fallen."""
MARGIN, EDGE = 3.0, 20.0
"""How far below the best rate of a sweep, and below the one at which it left, a whole training should stay: a sweep is
at a rate for one step only, and so bears more than a training does."""
FAINT, LONGER = 0.12, 4
"""Where no short training fell by more than this part of the loss, all of them may sit where the model only guesses
better than at the start; they are made so many times longer, to see which one leaves that."""
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
    """Suggest a learning rate. Model, optimizer, RNG and loader are afterwards what they were, to the bit.

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
    told = replace(found, trials=trials, num_steps=found.num_steps + num_steps * len(trials))
    fell = max(trials.values(), default=0.0)
    if not fell > 0:
        return told
    good = [rate for rate, by in trials.items() if by >= (1.0 - CLOSE) * fell]
    useful = [rate for rate, by in trials.items() if by >= (1.0 - USEFUL) * fell]
    middle = math.exp(sum(map(math.log, good)) / len(good))
    return replace(told, suggested=middle, low=min(useful), high=max(useful))


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
