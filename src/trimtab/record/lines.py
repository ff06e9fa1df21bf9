"""The lines that the documented tools print, to the letter: whoever greps for them finds them. Pure formatting."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

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
    """What is said before a run stops over its gradients."""
    return (
        f"❌ NaN/Inf detected in gradients at batch {batch}!\n"
        f"   Gradient norm: {_number(norm, '.4f')}\n"
        "   This indicates gradient explosion."
    )


def nonfinite_loss(batch: int, loss: float) -> str:
    """What is said before a run stops over its loss."""
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
    more = f" and {len(names) - NUM_NAMED} more" if len(names) > NUM_NAMED else ""
    return f"[GRAD]   {what}: {', '.join(names[:NUM_NAMED])}{more}"


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
