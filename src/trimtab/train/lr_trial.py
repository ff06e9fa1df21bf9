"""Short trainings at a few constant rates, all from the same start on the same batches: which one gets furthest?"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

from trimtab.checks.target import Target
from trimtab.checks.target_steps import compute_loss, endless, take_step
from trimtab.checks.untouched import untouched
from trimtab.train.lr_sweep import set_rates, shares_of, start_loss

APART = 3.0
"""Factor between neighbouring rates."""
MOST = 9
"""From so many trials on the ladder is left as it is."""
CLOSE = 0.05
"""A training that fell by this part less than the best one did as well: noise makes more difference."""
POOL = 64
END_FRAC = 0.3


def try_rates(target: Target, middle: float, *, low: float, high: float, num_steps: int) -> dict[float, float]:
    """How far the loss fell in short trainings at rates around `middle`; the ladder grows towards the better end."""
    with untouched(target) as rewind:
        pool = list(islice(endless(target), min(num_steps, POOL)))
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


def _fell(target: Target, rate: float, known: list[tuple[Any, float]]) -> float:
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
