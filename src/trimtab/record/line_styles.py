"""What each style of documented lines says about one sample: texts with their level, nothing where nothing is due."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from logging import INFO, WARNING

import numpy as np

from trimtab.core.types import ABSENT, FROZEN, Column, Kind, Sample
from trimtab.record import lines

Said = Iterator[tuple[int, str]]

CADENCE = {"a11": 100, "b5": 1, "b8": 0, "b9": 1, "c4": 10, "d2": 1, "e13": 10}
"""After how many steps each style has something to say; 0 is once per epoch, that is, with each validation."""
EVENTS = frozenset({"b5", "b9"})
"""Styles that speak when something happens, whatever the cadence."""
LIMITS: Mapping[str, Mapping[str, float]] = {
    "a11": {"exploding": 100.0, "vanishing": 1e-7},
    "b5": {"high": 5.0},
    "e13": {"exploding": 100.0, "vanishing": 1e-8, "zero": 1e-8, "zero_share": 0.5},
}
FIRST_PAUSE = 100


class Pace:
    """Lets a warning through at first, when it got twice as bad, and else after pauses that double while it lasts."""

    def __init__(self) -> None:
        self._worst = 0.0
        self._seen = self._next = -1
        self._pause = FIRST_PAUSE

    def due(self, step: int, badness: float) -> bool:
        """Whether to speak now of trouble that is this bad."""
        if step - self._seen > FIRST_PAUSE:  # it was gone for a while: this is new trouble
            self._pause, self._next, self._worst = FIRST_PAUSE, step, 0.0
        self._seen = step
        if step < self._next and not badness > 2.0 * self._worst:
            return False
        self._next, self._pause = step + self._pause, 2 * self._pause
        self._worst = max(self._worst, badness)
        return True


class Epoch:
    """The losses and gradient norms since the last summary."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget the epoch before."""
        self._norms = self._losses = self._highest = 0.0
        self._num_norms = self._num_losses = 0

    def add(self, sample: Sample) -> None:
        """Take in a step; what is not finite has lines of its own."""
        norm, loss = sample.scalars.get("grad_norm", math.nan), sample.scalars.get("loss", math.nan)
        if math.isfinite(norm):
            self._norms, self._num_norms = self._norms + norm, self._num_norms + 1
            self._highest = max(self._highest, norm)
        if math.isfinite(loss):
            self._losses, self._num_losses = self._losses + loss, self._num_losses + 1

    def summary(self, metrics: Mapping[str, float] | None = None) -> Said:
        """The documented lines about an epoch; then a new one begins."""
        if self._num_norms:
            yield INFO, lines.norm_summary(self._norms / self._num_norms, self._highest)
        if metrics:
            loss = {"Loss": self._losses / self._num_losses} if self._num_losses else {}
            yield INFO, lines.epoch_metrics({**loss, **metrics})
        self.begin()


class Facts:
    """What the styles remember of one optimizer's run, and the settings they need."""

    def __init__(self, limits: Mapping[str, float], clip: float | None) -> None:
        self.limits, self.clip = limits, clip
        self.epoch = Epoch()
        self.hints: set[str] = set()
        self._paces: dict[str, Pace] = {}

    def due(self, what: str, step: int, badness: float) -> bool:
        """Whether to warn of this now."""
        return self._paces.setdefault(what, Pace()).due(step, badness)

    def explodes(self, step: int, norm: float) -> bool:
        """Whether a norm is above its threshold and a warning is due."""
        return norm > self.limits["exploding"] and self.due("exploding", step, norm)

    def vanishes(self, step: int, norm: float) -> bool:
        """Whether a norm is below its threshold and a warning is due."""
        return norm < self.limits["vanishing"] and self.due("vanishing", step, 1.0 / max(norm, 1e-300))


def _norms(sample: Sample) -> tuple[float, float] | None:
    """The global norm before and after clipping."""
    norm = sample.scalars.get("grad_norm")
    if norm is None or sample.phase != "train":
        return None
    return norm, norm * sample.scalars.get("clip_coef", 1.0)


def _on(sample: Sample, every: int) -> bool:
    return sample.step % max(every, 1) == 0


def a11(sample: Sample, every: int, facts: Facts) -> Said:
    """The summary of all norms, and the two warnings whenever a threshold is passed."""
    norms, rows = _norms(sample), sample.col(Kind.GRAD, Column.L2).astype(np.float64)
    rows = rows[~(rows < 0)]
    if norms is None or not rows.size:
        return
    norm, smallest, step = norms[0], float(rows.min()), sample.step
    if _on(sample, every):
        yield INFO, lines.gradient_health(step, norm, float(rows.max()), smallest, float(rows.mean()))
    if facts.explodes(step, norm):
        yield WARNING, lines.exploding(norm)
    if facts.vanishes(step, smallest):
        yield WARNING, lines.vanishing(smallest)


def b5(sample: Sample, every: int, facts: Facts) -> Said:
    """The early warning: far more was clipped away than is usual."""
    norms = _norms(sample)
    if norms is None or not norms[1] < norms[0]:
        return
    norm, limit = norms[0], facts.clip or norms[1]
    if math.isfinite(norm) and norm > facts.limits["high"] * limit and facts.due("high", sample.step, norm):
        yield WARNING, lines.high_norm(norm, limit)


def b8(sample: Sample, every: int, facts: Facts) -> Said:
    """The norms of an epoch when it is validated, or of `every` steps; and the metrics of the validation."""
    if sample.phase == "train":
        facts.epoch.add(sample)
        if every and (sample.step + 1) % every == 0:
            yield from facts.epoch.summary()
        return
    metrics = {name.removeprefix("val/"): value for name, value in sample.scalars.items() if name.startswith("val/")}
    if not metrics and "val_loss" in sample.scalars:
        metrics = {"Val loss": sample.scalars["val_loss"]}
    yield from facts.epoch.summary(metrics)


def b9(sample: Sample, every: int, facts: Facts) -> Said:
    """What is said when loss or gradients are not finite; an overflow that a scaler provoked is routine."""
    scalars = sample.scalars
    if sample.phase != "train" or scalars.get("routine_overflow"):
        return
    loss = scalars.get("loss", 0.0)
    if not math.isfinite(loss) and facts.due("loss", sample.step, 1.0):
        yield WARNING, lines.nonfinite_loss(sample.step, loss)
    if scalars.get("nonfinite_grads") and facts.due("gradients", sample.step, 1.0):
        yield WARNING, lines.nonfinite_gradients(sample.step, scalars.get("grad_norm", math.nan))


def c4(sample: Sample, every: int, facts: Facts) -> Said:
    """The diagnostic line, in steps where everything in it was measured."""
    norms, scalars = _norms(sample), sample.scalars
    if norms is None or not _on(sample, every):
        return
    if "loss" not in scalars:
        facts.hints.add("the diagnostic line needs the loss: tell it with guard.observe(loss=...)")
    elif "weight_norm" in scalars and "lr/0" in scalars:
        lr = scalars["lr/0"] * scalars.get("lr_multiplier", 1.0)
        yield INFO, lines.step_diagnostics(sample.step, scalars["loss"], *norms, scalars["weight_norm"], lr)


def d2(sample: Sample, every: int, facts: Facts) -> Said:
    """Both norms."""
    norms = _norms(sample)
    if norms is not None and _on(sample, every):
        yield INFO, lines.norm_before_clipping(norms[0])
        yield INFO, lines.norm_after_clipping(norms[1])


def e13(sample: Sample, every: int, facts: Facts) -> Said:
    """The `[GRAD]` line with the parameters that have a problem, and warnings of the whole."""
    norms, rows = _norms(sample), sample.col(Kind.GRAD, Column.L2).astype(np.float64)
    wanted = rows != FROZEN
    if norms is None or not wanted.any():
        return
    rows, step = rows[wanted], sample.step
    bad, zero = ~np.isfinite(rows), rows < facts.limits["zero"]  # ABSENT is below it, too: no gradient is none
    num = rows.size
    if _on(sample, every):
        names = [name for name, wants in zip(sample.names(Kind.GRAD), wanted, strict=True) if wants]
        known = rows[~bad & (rows > ABSENT)].tolist()
        yield (
            INFO,
            lines.gradient_diagnostics(
                step, norms[0], known, num_zero=int(zero.sum()), num_nonfinite=int(bad.sum()), num_parameters=num
            ),
        )
        for what, which in (("no gradient", rows == ABSENT), ("zero", zero & (rows > ABSENT)), ("NaN/Inf", bad)):
            if which.any():
                yield INFO, lines.gradient_problem(what, [n for n, here in zip(names, which, strict=True) if here])
    share = float(zero.mean())
    if share > facts.limits["zero_share"] and facts.due("zero", step, share):
        yield WARNING, lines.gradient_warning(step, f"{int(zero.sum())} of {num} gradients are zero")
    if facts.explodes(step, norms[0]):
        yield WARNING, lines.gradient_warning(step, f"the global norm of {norms[0]:.2e} is too large")
    if facts.vanishes(step, norms[0]):
        yield WARNING, lines.gradient_warning(step, f"the global norm of {norms[0]:.2e} is too small")


STYLES: Mapping[str, Callable[[Sample, int, Facts], Said]] = {
    "a11": a11,
    "b5": b5,
    "b8": b8,
    "b9": b9,
    "c4": c4,
    "d2": d2,
    "e13": e13,
}
