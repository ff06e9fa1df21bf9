"""A warm-up for the next run, or none, from how this one began."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trimtab.core.schedule import rates_of
from trimtab.record.reader import Run
from trimtab.report.suggest import MIN_STEPS, WINDOW, Floats, settled, too_short, true_norms

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
