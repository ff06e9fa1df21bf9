"""When did it begin? The change point before an alarm, from how far each step lies from the run's own quiet past."""

from __future__ import annotations

import math

import numpy as np

from trimtab.core.schedule import JUMP
from trimtab.core.stats.trail import F64, Trail

HORIZON = 96
"""How far back the onset is looked for; what lies before is what "usual" is learned from."""
MIN_QUIET = 8
SLACK, CAP = 2.5, 6.0
LOG_FLOOR = 0.15
"""The least spread of logarithms that is believed."""
RATES = math.log(JUMP) / SLACK
"""A rate counts from a jump above the usual one on. Below that it may be meant, and where it is not the loss tells."""
LEVEL = 9


def onset_of(trail: Trail, at: int) -> int:
    """The first step of the trouble that was found at step `at`; `at` itself where nothing was unusual before it.

    Every step gets a score: by how many robust deviations its most unusual quantity lies above what is usual (the loss
    above its best level, gradients and updates above their quiet past, the rate above the one used so far). The onset
    is where the sum of the scores from there to the alarm, each less a slack, is largest: the maximum-likelihood change
    point of a CUSUM. Deterministic in the trail.
    """
    trail_steps = trail.steps
    num = int(np.searchsorted(trail_steps, at, side="right"))
    if num < 2 * MIN_QUIET:
        return at
    quiet = max(num - HORIZON, num // 2)
    with np.errstate(all="ignore"):
        scores = _scores(trail, num, quiet)
    gains = np.minimum(scores, CAP) - SLACK
    gains[-1] = max(gains[-1], CAP - SLACK)  # the alarm itself
    sums = np.cumsum(gains[::-1])[::-1]
    first = int(np.flatnonzero(sums >= sums.max() - 1e-9)[-1])
    return int(trail_steps[quiet + first])


def _scores(trail: Trail, num: int, quiet: int) -> F64:
    """One number for each step from `quiet` on."""
    parts = [
        _climb(trail.scalar("loss")[:num])[quiet:],
        _above(trail.scalar("grad_norm")[:num, None], quiet)[quiet:],
        _above(_by_rate(trail, num)[:, None], quiet)[quiet:],
        _raised(trail.scalar("lr")[:num], quiet)[quiet:],
    ]
    rows = trail.rows()[:num]
    if rows.shape[1]:
        parts.append(_calibrated(_above(rows, quiet), quiet)[quiet:])
    clean = np.stack([np.nan_to_num(p, nan=-CAP, posinf=CAP, neginf=-CAP) for p in parts])
    scores: F64 = clean.max(axis=0)
    return scores


def _by_rate(trail: Trail, num: int) -> F64:
    """The size of updates per rate: that they grow with the rate is no news besides the rate."""
    ratios, rates = trail.scalar("update_ratio")[:num], trail.scalar("lr")[:num]
    return ratios - np.where(np.isfinite(rates), rates, 0.0)


def _above(values: F64, quiet: int) -> F64:
    """How far the most unusual column of each step lies above its quiet past, in robust deviations."""
    past = np.where(np.isfinite(values[:quiet]), values[:quiet], np.nan)
    known = np.isfinite(past).sum(axis=0) >= MIN_QUIET
    if not known.any():
        return np.full(len(values), np.nan)
    past = past[:, known]
    centre = np.nanmedian(past, axis=0)
    spread = np.maximum(1.4826 * np.nanmedian(np.abs(past - centre), axis=0), LOG_FLOOR)
    z = (values[:, known] - centre) / spread
    most: F64 = np.where(np.isnan(z), -np.inf, z).max(axis=1)
    return most


def _calibrated(scores: F64, quiet: int) -> F64:
    """The largest of many columns is large by chance: it is judged by what it usually is."""
    past = scores[:quiet][np.isfinite(scores[:quiet])]
    if past.size < MIN_QUIET:
        return np.full(len(scores), np.nan)
    centre = float(np.median(past))
    return (scores - centre) / max(1.4826 * float(np.median(np.abs(past - centre))), 1.0)


def _raised(rates: F64, quiet: int) -> F64:
    """The rate against the high end of those used before: the middle of a warm-up is no reference."""
    past = rates[:quiet][np.isfinite(rates[:quiet])]
    return (rates - np.quantile(past, 0.9)) / RATES if past.size >= MIN_QUIET else np.full(len(rates), np.nan)


def _climb(losses: F64) -> F64:
    """How far each loss lies above the best level before it, in units of the noise around that level."""
    out = np.full(len(losses), np.nan)
    known = np.flatnonzero(np.isfinite(losses))
    if known.size < 2 * LEVEL:
        return np.where(np.isposinf(losses), np.inf, out)
    values = losses[known]
    windows = np.lib.stride_tricks.sliding_window_view(values, LEVEL)
    levels = np.median(windows, axis=1)  # levels[i] is that of values[i : i + LEVEL]
    best = np.minimum.accumulate(levels)
    off = np.abs(values[LEVEL:] - levels[:-1])
    # The noise of a calm stretch: the lower quartile of what it was, so that a climb does not hide in its own noise.
    spreads = 1.25 * np.array(
        [off[: i + 1].mean() if i < LEVEL else off[i - LEVEL : i + 1].mean() for i in range(off.size)]
    )
    noise = np.array([np.quantile(spreads[max(0, i - 64) : i + 1], 0.25) for i in range(off.size)])
    floor = 1e-2 * np.abs(best[:-1]) + 1e-6
    out[known[LEVEL:]] = (values[LEVEL:] - best[:-1]) / np.maximum(2.0 * noise, floor)
    return np.where(np.isposinf(losses), np.inf, out)
