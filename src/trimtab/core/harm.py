"""Whether trouble did harm: to the weights, or to gradients that left the range of the run and do not come back.

A loss that rises is no harm by itself. In reinforcement learning, in games of two models and wherever a model sets its
own targets it rises while the run gets better. What is done about a finding (rewind, cut the rate, stop) needs harm.
"""

from __future__ import annotations

import math

import numpy as np

from trimtab.core.stats.trail import F64, Trail
from trimtab.core.window import Window

THROWN = 3.0
"""Times the largest relative update before the onset: a step that went so far left the region the run was in."""
LEAST_THROWN = 0.02
"""Smaller relative updates shake no network, however small the others were."""
REPLACED = 0.3
"""A step that changes the weights by this share of their size replaces them, whatever came before."""
LEFT, STAY = 3.0, 8
"""Times the largest gradient norm before the onset, as the median of this many recent steps."""
BURST = 30.0
"""The same for a single step, where the objective is fixed: it fills Adam's second moments for a thousand steps. Where
the objective moves, the first reward does as much."""
NUM_EARLY, NUM_LATE, TIMES, BEYOND = 32, 12, 4.0, 2.0


def harm_of(trail: Trail, onset: int, *, fixed: bool) -> float:
    """How far the steps since `onset` went beyond all before it: 1 or more is harm, infinity a value that is gone.

    `fixed` says whether the objective is known to stay the same.
    """
    if not len(trail):
        return 0.0
    first = min(int(np.searchsorted(trail.steps, onset)), len(trail) - 1)
    losses, norms, updates = (trail.scalar(name) for name in ("loss", "grad_norm", "update_ratio"))
    if np.isposinf(losses[first:]).any() or np.isposinf(norms[first:]).any():
        return math.inf
    parts = [_largest(updates[first:]) - math.log(REPLACED)]
    if first > 0:
        parts.append(_largest(updates[first:]) - trail.scalar("update_high")[first - 1] - math.log(THROWN))
        if fixed:
            parts.append(_largest(norms[first:]) - trail.scalar("norm_high")[first - 1] - math.log(BURST))
        late = norms[first:][-STAY:]
        if len(late) == STAY and np.isfinite(late).all():
            parts.append(float(np.median(late)) - trail.scalar("norm_high")[first - 1] - math.log(LEFT))
    known = [p for p in parts if math.isfinite(p)]
    return math.exp(min(max(known), 50.0)) if known else 0.0


def _largest(values: F64) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.max()) if finite.size else -math.inf


def gradients_left(window: Window) -> bool:
    """Whether gradient norms rose far above their range, that of the whole run, within the last 64 steps and stay."""
    norms = window.last("grad_norm", 64)
    if len(norms) < NUM_EARLY + NUM_LATE:
        return False
    late = sorted(norms[-NUM_LATE:])
    return late[NUM_LATE // 2] > max(
        TIMES * max(norms[:NUM_EARLY]), BEYOND * window.history("grad_norm").highest_before
    )


def one_step_did_harm(window: Window) -> bool:
    """Whether the newest step alone went beyond all that the run has seen: its gradient, or what it did to weights.

    For an objective that may move: rare events, such as a first reward or a late failure, give large gradients, but
    none that dwarf all before, and a rate or a clip that fits keeps what they do to the weights within its range.
    """
    norm, update = window.scalar("grad_norm"), window.scalar("update_ratio")
    norms, updates = window.history("grad_norm"), window.history("update_ratio")
    if update is not None and len(updates) and math.isfinite(update):
        return update > max(THROWN * updates.highest, LEAST_THROWN)
    return norm is not None and norm > BURST * norms.highest


def weights_thrown(window: Window) -> bool:
    """Whether a recent step replaced a good part of the weights."""
    return max(window.last("update_ratio", 64), default=0.0) >= REPLACED


def is_fixed_objective(window: Window) -> bool:
    """Whether the loss is known to measure something that stays the same, and belongs to one optimizer alone."""
    return any(window.last("fixed", 8)) and not window.now.layout.optimizer and not any(window.last("moving", 8))
