"""The exact lines that the documented tools print, and which of them each style prints for a sample."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from logging import INFO, WARNING

import numpy as np

from trimtab.core.types import ABSENT, FROZEN, Column, Kind, Sample

NUM_NAMED = 4


def gradient_health(step: int | None, global_norm: float, max_norm: float, min_norm: float, mean_norm: float) -> str:
    """The one-line summary of a step's gradients.

    Example:
        >>> gradient_health(150, 125.43, 340.12, 3.2e-08, 45.67)
        'Step 150 - Gradient Health: Global Norm=125.4300, Max=340.1200, Min=3.20e-08, Mean=45.6700'
    """
    lead = "" if step is None else f"Step {step} - "
    return (
        f"{lead}Gradient Health: Global Norm={global_norm:.4f}, Max={max_norm:.4f}, "
        f"Min={min_norm:.2e}, Mean={mean_norm:.4f}"
    )


def exploding(norm: float) -> str:
    """The warning about large gradients, with its advice on a second line."""
    return (
        f"⚠️ Exploding gradients detected (norm={norm:.2f})!\n"
        "   Consider: (1) Gradient clipping, (2) Reducing learning rate"
    )


def vanishing(min_norm: float) -> str:
    """The warning about small gradients, with its advice on a second line."""
    return (
        f"⚠️ Vanishing gradients detected (min norm={min_norm:.1e})!\n"
        "   Consider: (1) Using residual connections, (2) Changing activation functions"
    )


def high_norm(norm: float, clip: float) -> str:
    """The early warning above five times the clip threshold.

    Example:
        >>> high_norm(2.5, 0.5)
        '⚠️  High gradient norm detected: 2.50 (clipped to 0.5)'
    """
    return f"⚠️  High gradient norm detected: {norm:.2f} (clipped to {clip:g})"


def nonfinite_gradients(batch: int, norm: float) -> str:
    """The message before a run stops because of its gradients."""
    return (
        f"❌ NaN/Inf detected in gradients at batch {batch}!\n"
        f"   Gradient norm: {_number(norm, '.4f')}\n"
        "   This indicates gradient explosion."
    )


def nonfinite_loss(batch: int, loss: float) -> str:
    """The message before a run stops because of its loss."""
    return f"❌ NaN/Inf detected in loss at batch {batch}!\n   Loss: {_number(loss, '.4f')}"


def epoch_bar(epoch: int, num_epochs: int, done: int, total: int, elapsed_s: float, loss: float, grad: float) -> str:
    """One epoch as a finished progress bar.

    Example:
        >>> epoch_bar(44, 140, 125, 125, 345, 2.37, 0.423)
        'Epoch 44/140: 100%|████| 125/125 [05:45<00:00, loss=2.37, grad=0.423]'
    """
    frac = done / max(total, 1)
    filled = round(4 * frac)
    left_s = elapsed_s / done * (total - done) if done else math.nan
    values = ", ".join(f"{name}={value}" for name, value in bar_values(loss, grad).items())
    return (
        f"Epoch {epoch}/{num_epochs}: {round(100 * frac):>3}%|{'█' * filled}{' ' * (4 - filled)}| {done}/{total} "
        f"[{_clock(elapsed_s)}<{_clock(left_s)}, {values}]"
    )


def norm_summary(average: float, highest: float) -> str:
    """The gradient norms of an epoch.

    Example:
        >>> norm_summary(0.381, 0.498)
        '   Gradient norm - Avg: 0.381, Max: 0.498'
    """
    return f"   Gradient norm - Avg: {_number(average, '.3f')}, Max: {_number(highest, '.3f')}"


def epoch_metrics(metrics: Mapping[str, float]) -> str:
    """The metrics of an epoch side by side.

    Example:
        >>> epoch_metrics({"Loss": 2.37, "IoU": 0.5845, "Dice": 0.735})
        'Loss: 2.3700 | IoU: 0.5845 | Dice: 0.7350'
    """
    return " | ".join(f"{name}: {_number(value, '.4f')}" for name, value in metrics.items())


def step_diagnostics(step: int, loss: float, before: float, after: float, param_norm: float, lr: float) -> str:
    """The diagnostic line of every tenth step; clipped is what came out smaller than it went in.

    Example:
        >>> step_diagnostics(10, 3.2, 2.0, 1.5, 11.25, 3.45e-06)
        '[Step 10] Loss: 3.2000 | Grad norm: 2.0000 -> 1.5000 (clipped: YES) | Param norm: 11.2500 | LR: 0.000003'
    """
    clipped = "YES" if after < before else "NO"
    norms = f"{_number(before, '.4f')} -> {_number(after, '.4f')} (clipped: {clipped})"
    return (
        f"[Step {step}] Loss: {_number(loss, '.4f')} | Grad norm: {norms} | "
        f"Param norm: {_number(param_norm, '.4f')} | LR: {lr:.6f}"
    )


def norm_before_clipping(norm: float) -> str:
    """The norm of all gradients as they came."""
    return f"Gradient norm before clipping: {norm:.6f}"


def norm_after_clipping(norm: float) -> str:
    """The norm of all gradients as the optimizer gets them."""
    return f"Gradient norm after clipping: {norm:.6f}"


def gradient_diagnostics(
    step: int, global_norm: float, norms: Iterable[float], *, num_zero: int, num_nonfinite: int, num_parameters: int
) -> str:
    """The `[GRAD]` line; `norms` are those of the parameters with a finite gradient.

    Example:
        >>> line = gradient_diagnostics(0, 1.23, [0.5, 1.1], num_zero=0, num_nonfinite=0, num_parameters=2)
        >>> line[:68]
        '[GRAD] Step    0 | Global: 1.23e+00 | Zero: 0/2 | NaN/Inf: 0/2 | Max'
        >>> line[68:]
        ': 1.10e+00 | Avg: 8.00e-01 | Range: [5.00e-01, 1.10e+00]'
    """
    known = list(norms)
    low, high = (min(known), max(known)) if known else (math.nan, math.nan)
    average = sum(known) / len(known) if known else math.nan
    counts = {"num_zero": num_zero, "num_nonfinite": num_nonfinite, "num_parameters": num_parameters}
    return gradient_line(step, global_norm, low, high, average, **counts)


def gradient_line(
    step: int,
    global_norm: float,
    low: float,
    high: float,
    average: float,
    *,
    num_zero: int,
    num_nonfinite: int,
    num_parameters: int,
) -> str:
    """The `[GRAD]` line of norms that are summed up already: the lowest, the highest and their mean."""
    return (
        f"[GRAD] Step {step:>4} | Global: {global_norm:.2e} | Zero: {num_zero}/{num_parameters} | "
        f"NaN/Inf: {num_nonfinite}/{num_parameters} | Max: {high:.2e} | Avg: {average:.2e} | "
        f"Range: [{low:.2e}, {high:.2e}]"
    )


def gradient_problem(what: str, names: Sequence[str]) -> str:
    """Which parameters have a problem, below the `[GRAD]` line.

    Example:
        >>> gradient_problem("zero", ["a", "b", "c", "d", "e", "f"])
        '[GRAD]   zero: a, b, c, d and 2 more'
    """
    return f"[GRAD]   {what}: {some(names)}"


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are.

    Example:
        >>> some(["a", "b", "c", "d", "e"])
        'a, b, c, d and 1 more'
    """
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return ", ".join(names[:NUM_NAMED]) + more


def gradient_warning(step: int, text: str) -> str:
    """A warning about all gradients together.

    Example:
        >>> gradient_warning(20, "7 of 12 gradients are zero")
        '[GRAD] Step   20 | ⚠️  7 of 12 gradients are zero'
    """
    return f"[GRAD] Step {step:>4} | ⚠️  {text}"


def bar_values(loss: float, grad: float) -> dict[str, str]:
    """What a progress bar shows beside its count.

    Example:
        >>> bar_values(2.3699, 0.4231)
        {'loss': '2.37', 'grad': '0.423'}
    """
    return {"loss": _number(loss, ".2f"), "grad": _number(grad, ".3f")}


def _number(value: float, spec: str) -> str:
    return format(value, spec) if math.isfinite(value) else str(float(value))


def _clock(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


Lines = Iterator[tuple[int, str]]

CADENCE = {"a11": 100, "b5": 1, "b8": 0, "b9": 1, "c4": 10, "d2": 1, "e13": 10}
"""After how many steps each style prints; 0 is once per epoch, that is, with each validation."""
EVENTS = frozenset({"b5", "b9"})
"""Styles that print when something happens, whatever the cadence."""
LIMITS: Mapping[str, Mapping[str, float]] = {
    "a11": {"exploding": 100.0, "vanishing": 1e-7},
    "b5": {"high": 5.0},
    "e13": {"exploding": 100.0, "vanishing": 1e-8, "zero": 1e-8, "zero_share": 0.5},
}
FIRST_PAUSE = 100


class Pace:
    """Lets a warning through at first, when it is twice as bad, and otherwise after pauses that double."""

    def __init__(self) -> None:
        self._worst = 0.0
        self._seen = self._next = -1
        self._pause = FIRST_PAUSE

    def due(self, step: int, badness: float) -> bool:
        """Whether to warn now of trouble that is this bad."""
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
        """Start an epoch."""
        self._norms = self._losses = self._highest = 0.0
        self._num_norms = self._num_losses = 0

    def add(self, sample: Sample) -> None:
        """Add a step; non-finite values have their own lines."""
        norm, loss = sample.scalars.get("grad_norm", math.nan), sample.scalars.get("loss", math.nan)
        if math.isfinite(norm):
            self._norms, self._num_norms = self._norms + norm, self._num_norms + 1
            self._highest = max(self._highest, norm)
        if math.isfinite(loss):
            self._losses, self._num_losses = self._losses + loss, self._num_losses + 1

    def summary(self, metrics: Mapping[str, float] | None = None) -> Lines:
        """The documented lines about an epoch; then a new one begins."""
        if self._num_norms:
            yield INFO, norm_summary(self._norms / self._num_norms, self._highest)
        if metrics:
            loss = {"Loss": self._losses / self._num_losses} if self._num_losses else {}
            yield INFO, epoch_metrics({**loss, **metrics})
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


def a11(sample: Sample, every: int, facts: Facts) -> Lines:
    """The summary of all norms, and the two warnings whenever a threshold is passed."""
    norms, rows = _norms(sample), sample.col(Kind.GRAD, Column.L2).astype(np.float64)
    rows = rows[~(rows < 0)]
    if norms is None or not rows.size:
        return
    norm, smallest, step = norms[0], float(rows.min()), sample.step
    if _on(sample, every):
        yield INFO, gradient_health(step, norm, float(rows.max()), smallest, float(rows.mean()))
    if facts.explodes(step, norm):
        yield WARNING, exploding(norm)
    if facts.vanishes(step, smallest):
        yield WARNING, vanishing(smallest)


def b5(sample: Sample, every: int, facts: Facts) -> Lines:
    """The early warning: far more was clipped away than is usual."""
    norms = _norms(sample)
    if norms is None or not norms[1] < norms[0]:
        return
    norm, limit = norms[0], facts.clip or norms[1]
    if math.isfinite(norm) and norm > facts.limits["high"] * limit and facts.due("high", sample.step, norm):
        yield WARNING, high_norm(norm, limit)


def b8(sample: Sample, every: int, facts: Facts) -> Lines:
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


def b9(sample: Sample, every: int, facts: Facts) -> Lines:
    """The messages about non-finite loss or gradients; an overflow at a high loss scale is routine."""
    scalars = sample.scalars
    if sample.phase != "train" or scalars.get("routine_overflow"):
        return
    loss = scalars.get("loss", 0.0)
    if not math.isfinite(loss) and facts.due("loss", sample.step, 1.0):
        yield WARNING, nonfinite_loss(sample.step, loss)
    if scalars.get("nonfinite_grads") and facts.due("gradients", sample.step, 1.0):
        yield WARNING, nonfinite_gradients(sample.step, scalars.get("grad_norm", math.nan))


def c4(sample: Sample, every: int, facts: Facts) -> Lines:
    """The diagnostic line, in steps where everything in it was measured."""
    norms, scalars = _norms(sample), sample.scalars
    if norms is None or not _on(sample, every):
        return
    if "loss" not in scalars:
        facts.hints.add("the diagnostic line needs the loss: pass it with guard.observe(loss=...)")
    elif "weight_norm" in scalars and "lr/0" in scalars:
        lr = scalars["lr/0"] * scalars.get("lr_multiplier", 1.0)
        yield INFO, step_diagnostics(sample.step, scalars["loss"], *norms, scalars["weight_norm"], lr)


def d2(sample: Sample, every: int, facts: Facts) -> Lines:
    """Both norms."""
    norms = _norms(sample)
    if norms is not None and _on(sample, every):
        yield INFO, norm_before_clipping(norms[0])
        yield INFO, norm_after_clipping(norms[1])


def e13(sample: Sample, every: int, facts: Facts) -> Lines:
    """The `[GRAD]` line with the parameters that have a problem, and warnings of the whole."""
    norms, rows = _norms(sample), sample.col(Kind.GRAD, Column.L2).astype(np.float64)
    wanted = rows != FROZEN
    if norms is None or not wanted.any():
        return
    rows, step = rows[wanted], sample.step
    bad, zero = ~np.isfinite(rows), rows < facts.limits["zero"]  # ABSENT is below it, too
    num = rows.size
    if _on(sample, every):
        names = [name for name, wants in zip(sample.names(Kind.GRAD), wanted, strict=True) if wants]
        known = rows[~bad & (rows > ABSENT)].tolist()
        yield (
            INFO,
            gradient_diagnostics(
                step, norms[0], known, num_zero=int(zero.sum()), num_nonfinite=int(bad.sum()), num_parameters=num
            ),
        )
        for what, which in (("no gradient", rows == ABSENT), ("zero", zero & (rows > ABSENT)), ("NaN/Inf", bad)):
            if which.any():
                yield INFO, gradient_problem(what, [n for n, here in zip(names, which, strict=True) if here])
    share = float(zero.mean())
    if share > facts.limits["zero_share"] and facts.due("zero", step, share):
        yield WARNING, gradient_warning(step, f"{int(zero.sum())} of {num} gradients are zero")
    if facts.explodes(step, norms[0]):
        yield WARNING, gradient_warning(step, f"the global norm of {norms[0]:.2e} is too large")
    if facts.vanishes(step, norms[0]):
        yield WARNING, gradient_warning(step, f"the global norm of {norms[0]:.2e} is too small")


STYLES: Mapping[str, Callable[[Sample, int, Facts], Lines]] = {
    "a11": a11,
    "b5": b5,
    "b8": b8,
    "b9": b9,
    "c4": c4,
    "d2": d2,
    "e13": e13,
}
