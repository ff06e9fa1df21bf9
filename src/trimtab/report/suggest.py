"""A clip threshold and a warm-up for the next run, or none, from how this one went."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trimtab.core.clipping import SPREAD_FLOOR
from trimtab.core.schedule import rates_of
from trimtab.record.reader import Run
from trimtab.report.summary import Trouble, find_troubles

MIN_STEPS = 30
"""Fewer healthy steps say too little about what is usual."""
PERCENTILE, DEVIATIONS = 99.0, 3.0
"""The threshold is the lower of this percentile of healthy norms and this many robust deviations of their logarithm
above the median: what is usual passes untouched, and a few spikes that nobody noticed cannot raise it."""
DISTORTING = frozenset(
    {
        "nonfinite-gradient", "nonfinite-loss", "nonfinite-weight", "nonfinite-input", "exploding-gradient",
        "zero-gradient", "stale-gradient", "loss-spike", "diverging-loss", "outlier-batch", "weight-jump",
        "weight-corrupted", "learning-rate", "double-step",
    }
)  # fmt: skip
"""Findings after which norms are not what they would be. Others, chronic clipping above all, leave them as they are."""
AFTERMATH = 10
"""Steps after an incident that are not counted as healthy: norms take a while to come back."""
WINDOW = 5
CHRONIC_FRAC = 0.5

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipAdvice:
    """A clip threshold and what it rests on; `threshold` is None where the run says too little.

    `chronic`: clipping there would act all the time in some part of the run, and hide something instead of fixing it.
    """

    optimizer: str
    threshold: float | None
    reasons: tuple[str, ...]
    num_steps: int
    num_healthy: int
    usual: float | None
    highest: float | None
    clipped_frac: float | None
    chronic: bool


def suggest_clip(run: Run) -> tuple[ClipAdvice, ...]:
    """A clip threshold for each optimizer: a high percentile of its healthy gradient norms, past their settling."""
    troubles = tuple(t for t in find_troubles(run.verdicts) if t.finding.name in DISTORTING)
    return tuple(_clip(run, name, troubles) for name in run.optimizers or ("",))


def _clip(run: Run, name: str, troubles: tuple[Trouble, ...]) -> ClipAdvice:
    steps, norms = true_norms(run, name)
    usable = np.isfinite(norms) & (norms > 0)
    healthy = usable & ~_troubled(run, name, troubles, steps)
    past = healthy & (np.arange(len(norms)) >= settled(np.where(healthy, norms, np.nan)))
    used = norms[past]
    facts = {"optimizer": name, "num_steps": len(norms), "num_healthy": len(used)}
    if len(used) < MIN_STEPS:
        return ClipAdvice(
            threshold=None,
            reasons=(too_short(len(used), len(norms), "norms"),),
            usual=None,
            highest=None,
            clipped_frac=None,
            chronic=False,
            **facts,  # type: ignore[arg-type]
        )
    threshold = _rounded(_bound(np.log(used)))
    usual, highest = float(np.median(used)), float(norms[usable].max())
    clipped = float(np.mean(norms[usable] > threshold))
    chronic = any(float(np.mean(part > threshold)) > CHRONIC_FRAC for part in np.array_split(norms[healthy], 3))
    reasons = [
        f"{100 * float(np.mean(used <= threshold)):.3g} % of {len(used):,} healthy steps had no larger gradient norm; "
        f"usual {usual:.3g}, highest {highest:.3g}.",
        f"It would have clipped {100 * clipped:.3g} % of all steps"
        + (f", the highest to 1/{highest / threshold:.3g} of its norm." if highest > 2 * threshold else "."),
    ]
    reasons += _clip_warnings(run, name, used, threshold, chronic, troubles)
    return ClipAdvice(
        threshold=threshold,
        reasons=tuple(reasons),
        usual=usual,
        highest=highest,
        clipped_frac=clipped,
        chronic=chronic,
        **facts,  # type: ignore[arg-type]
    )


def _bound(logs: Floats) -> float:
    middle = float(np.median(logs))
    spread = max(1.4826 * float(np.median(np.abs(logs - middle))), SPREAD_FLOOR)
    return float(np.exp(min(np.percentile(logs, PERCENTILE), middle + DEVIATIONS * spread)))


def _clip_warnings(
    run: Run, name: str, used: Floats, threshold: float, chronic: bool, troubles: tuple[Trouble, ...]
) -> list[str]:
    out = []
    if chronic:
        out.append(
            "In part of the run it would act on most steps: the norms drift, and a fixed threshold would only hide "
            'that. clip="percentile" follows them; a growing norm needs its cause found.'
        )
    spread = float(np.percentile(used, 99) / np.median(used))
    if spread > 30.0:
        out.append(
            f"One healthy step in a hundred has {spread:.3g} times the usual norm: clipping tames that, but the "
            "batches or the loss behind it deserve a look."
        )
    coef = run.series("clip_coef", optimizer=name)[1]
    coef = coef[np.isfinite(coef)]
    if len(coef) and float(np.median(coef)) < 0.5:
        out.append(
            f"This run was clipped to {100 * float(np.median(coef)):.2g} % of the norm on most steps, so that its rate "
            "was really so much lower: with this threshold, lower the learning rate to match."
        )
    bad = sum(t.last_step - t.finding.step + 1 for t in troubles if t.finding.optimizer == name)
    if bad > 0.2 * max(len(used), 1):
        out.append(f"{bad:,} steps were in trouble: fix that first (trimtab report), then run this again.")
    return out


def settled(norms: Floats) -> int:
    """The first step from which norms are as they are later in the run; at most a quarter of it.

    Example:
        >>> settled(np.array([100.0] * 8 + [1.0, 1.1] * 50))
        8
    """
    usable = np.isfinite(norms) & (norms > 0)
    logs = np.log(norms, where=usable, out=np.full(len(norms), np.nan))
    later = logs[len(logs) // 2 :]
    later = later[np.isfinite(later)]
    if later.size < WINDOW:
        return 0
    level = float(np.median(later))
    spread = max(1.4826 * float(np.median(np.abs(later - level))), 0.2)
    last = len(logs) // 4
    for at in range(last):
        part = logs[at : at + 2 * WINDOW]
        part = part[np.isfinite(part)]
        if part.size and abs(float(np.median(part[:WINDOW])) - level) < 3.0 * spread:
            first = np.flatnonzero(np.abs(logs[at:last] - level) < 3.0 * spread)
            return at + int(first[0]) if first.size else at
    return last


def true_norms(run: Run, name: str) -> tuple[NDArray[np.int64], Floats]:
    """Gradient norms before any clipping, the loop's own included where it was seen."""
    steps, norms = run.series("grad_norm", optimizer=name)
    seen = dict(zip(*run.series("handed", optimizer=name), strict=True))
    left = np.array([seen.get(s, 1.0) for s in steps], np.float64)
    return steps, norms / np.where((left > 0) & (left < 0.99), left, 1.0)


def _troubled(run: Run, name: str, troubles: tuple[Trouble, ...], steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Steps that were rejected or skipped, or lie in an incident or right after one."""
    bad = np.zeros(len(steps), bool)
    for what in ("rejected", "scaler_skipped", "routine_overflow"):
        at, flags = run.series(what, optimizer=name)
        bad |= np.isin(steps, at[flags > 0])
    for one in troubles:
        if one.finding.optimizer == name:
            end = max(one.last_step + AFTERMATH, _recovered(run, name, one))
            bad |= (steps >= one.finding.step - 1) & (steps <= end)
    return bad


def _recovered(run: Run, name: str, trouble: Trouble) -> float:
    """The step at which the loss was back where it had been; infinite where it never was.

    A network that was thrown out of its valley trains on, with norms that say nothing about the one it was.
    """
    steps, losses = run.series("loss", optimizer=name)
    steps, losses = steps[np.isfinite(losses)], losses[np.isfinite(losses)]
    before = losses[steps < trouble.finding.step][-4 * WINDOW :]
    if len(before) < WINDOW:
        return float(trouble.last_step)
    level = float(np.median(before))
    noise = 1.4826 * float(np.median(np.abs(before - level)))
    bound = level + max(3.0 * noise, 0.1 * abs(float(losses[0]) - level))
    after = np.flatnonzero(steps > trouble.last_step)
    back = [i for i in after if float(np.median(losses[i : i + WINDOW])) <= bound]
    return float(steps[back[0]]) if back else float("inf")


def _rounded(value: float) -> float:
    """Two digits: more would claim a precision that no threshold has."""
    return float(f"{value:.2g}")


def too_short(num: int, total: int, what: str) -> str:
    """Say that there are too few steps to go by."""
    return (
        f"Only {num} of {total:,} steps have healthy, settled gradient {what}; at least {MIN_STEPS} are needed. "
        "Train longer, or fix what `trimtab report` shows."
    )


ROSE, EARLY_NORM, VIOLENT = 0.1, 10.0, 0.125
"""From where on the beginning of a run asks for a warm-up: the part of its later fall that the loss rose first, the
first norms over later ones, and the part of their size by which the first updates changed the weights."""
MIN_WARMUP, PLAIN_WARMUP = 10, 200
MOST_FRAC = 1 / 3
"""The longest warm-up, as a part of the run."""
BETA2 = 0.999
MOMENTS = round(2.0 / (1.0 - BETA2))
"""Steps after which Adam's second moment is worth something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupAdvice:
    """A number of warm-up steps (0: none needed) and what it rests on; None where the run says too little."""

    optimizer: str
    num_steps: int | None
    reasons: tuple[str, ...]
    settled_at: int | None
    early_norm: float | None
    early_update: float | None
    loss_rose: float | None
    adam: bool
    warmed_up: int


def suggest_warmup(run: Run) -> tuple[WarmupAdvice, ...]:
    """A warm-up for each optimizer, from how its first steps compare with where it settled."""
    return tuple(_warmup(run, name) for name in run.optimizers or ("",))


def _warmup(run: Run, name: str) -> WarmupAdvice:
    _, norms = true_norms(run, name)
    adam = len(run.series("moment_lag", optimizer=name)[1]) > 0
    warmed_up = _warmed_up(run, name)
    if int(np.isfinite(norms).sum()) < MIN_STEPS:
        return WarmupAdvice(
            optimizer=name,
            num_steps=None,
            reasons=(too_short(int(np.isfinite(norms).sum()), len(norms), "norms"),),
            settled_at=None,
            early_norm=None,
            early_update=None,
            loss_rose=None,
            adam=adam,
            warmed_up=warmed_up,
        )
    at = settled(norms)
    early_norm = _early(norms)
    updates = run.series("update_ratio", optimizer=name)[1]
    early_update = float(np.median(updates[:WINDOW])) if len(updates) else math.nan
    rose, back = _rose(run.series("loss", optimizer=name)[1])
    num, reasons = _weigh(len(norms), at, back, early_norm, early_update, rose, adam, warmed_up)
    return WarmupAdvice(
        optimizer=name,
        num_steps=num,
        reasons=tuple(reasons),
        settled_at=at,
        early_norm=early_norm,
        early_update=early_update,
        loss_rose=rose,
        adam=adam,
        warmed_up=warmed_up,
    )


def _weigh(
    num: int, at: int, back: int, early_norm: float, early_update: float, rose: float, adam: bool, warmed_up: int
) -> tuple[int, list[str]]:
    """How many steps of warm-up, and why."""
    settling = f"; they settled at step {at}" if at else ""
    facts = [f"The first gradient norms were {early_norm:.2g} times the later ones{settling}."]
    if math.isfinite(early_update):
        facts.append(f"The first updates changed the weights by {100 * early_update:.2g} % of their size each.")
    signs = []
    if rose > ROSE:
        signs.append(f"the loss rose first, until step {back}")
    if early_norm > EARLY_NORM:
        signs.append("gradients were far larger than later")
    if early_update > VIOLENT:
        signs.append(f"updates above {100 * VIOLENT:.3g} % throw the weights about")
    if not signs:
        facts.append("The loss fell from the beginning" + (", with the warm-up it had." if warmed_up else "."))
        return warmed_up, facts
    facts.append("A warm-up would help: " + "; ".join(signs) + ".")
    wanted = max(at, 2 * warmed_up, 2 * back, MOMENTS if adam else PLAIN_WARMUP)
    if adam:
        facts.append(
            f"Adam knows the size of gradients only after about 2 / (1 - beta2) steps, {MOMENTS:,} for beta2 {BETA2}."
        )
    most = max(int(MOST_FRAC * num), MIN_WARMUP)
    if wanted > most:
        facts.append(f"{wanted:,} steps were more than a third of this run, so that it is {most:,}.")
    return min(wanted, most), facts


def _early(values: Floats) -> float:
    """The first few values over those of the later half."""
    values = values[np.isfinite(values)]
    later = float(np.median(values[len(values) // 2 :])) if len(values) > 4 * WINDOW else 0.0
    return float(np.median(values[:WINDOW])) / later if later > 0 else math.nan


def _rose(losses: Floats) -> tuple[float, int]:
    """How far the loss rose above its start before it fell, as a part of what it fell in all, and until which step.

    Both are 0 where it rose no further than its noise.
    """
    losses = losses[np.isfinite(losses)]
    if len(losses) < 4 * WINDOW:
        return 0.0, 0
    early = losses[: max(len(losses) // 2, 2 * WINDOW)]
    smooth = np.convolve(early, np.full(3, 1 / 3), mode="valid")
    noise = 1.4826 * float(np.median(np.abs(np.diff(losses)))) / math.sqrt(2.0)
    start, rise = float(losses[0]), float(smooth.max()) - float(losses[0])
    fell = start - float(np.median(losses[-2 * WINDOW :]))
    if not rise > 3.0 * noise:
        return 0.0, 0
    return rise / max(abs(fell), 1e-12), int(np.flatnonzero(smooth > start + noise)[-1]) + 1


def _warmed_up(run: Run, name: str) -> int:
    """How many steps the rate rose from the start, where it did."""
    rates = [
        max(rates_of(s.scalars), default=math.nan) for s in run.samples() if s.optimizer == name and s.phase == "train"
    ]
    num = next((i for i in range(1, len(rates)) if not rates[i] > rates[i - 1]), 0)
    return num if num > 1 and rates[num - 1] > 1.5 * rates[0] else 0
