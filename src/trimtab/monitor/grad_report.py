"""One look at all gradients as the `[GRAD]` line, the parameters in trouble, and counts of trouble so far."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trimtab.monitor.flow import ZERO_NORM
from trimtab.monitor.snapshot import GradSnapshot
from trimtab.record import lines

log = logging.getLogger("trimtab")

HIGH_GLOBAL, LOW_GLOBAL = 100.0, 1e-8
ZERO_SHARE = 0.5
NUM_NAMED = 10
COUNTS = ("grad_is_none_count", "grad_all_zero_count", "grad_nan_inf_count")

Mask = NDArray[np.bool_]


def grad_report(step: int, seen: GradSnapshot, none: Mask, counts: dict[str, dict[str, int]]) -> dict[str, Any]:
    """Log one look at the gradients, add it to the `counts` by parameter, and return its numbers.

    `none` marks the trainable parameters that got no gradient, be there an old one.

    Example:
        >>> import torch
        >>> from trimtab.monitor.snapshot import snapshot
        >>> model = torch.nn.Linear(2, 1)
        >>> model(torch.zeros(1, 2)).sum().backward()
        >>> report = grad_report(0, snapshot(model), np.zeros(2, bool), {})
        >>> report["problems"], report["parameters"]["weight"]["grad_all_zero_count"]
        (['weight: zero gradient (norm 0.00e+00)'], 1)
    """
    there = seen.present & ~none
    bad = there & (seen.nan + seen.inf > 0)
    zero = there & (seen.norms < ZERO_NORM)
    trainable = there | none
    norms = seen.norms[there & ~bad].tolist()
    parameters = {
        seen.names[i]: _counted(counts, seen, i, (bool(none[i]), bool(zero[i]), bool(bad[i])))
        for i in np.flatnonzero(trainable).tolist()
    }
    num = {"num_zero": int(zero.sum()), "num_nonfinite": int(bad.sum()), "num_parameters": int(trainable.sum())}
    log.info("%s", lines.gradient_diagnostics(step, seen.global_norm, norms, **num))
    problems = _problems(seen, none, zero, bad)
    _warn(seen.global_norm, num["num_zero"] + int(none.sum()), num["num_parameters"], problems)
    return {
        "step": step,
        "global_norm": seen.global_norm,
        **num,
        "num_none": int(none.sum()),
        "max_norm": max(norms, default=math.nan),
        "avg_norm": sum(norms) / len(norms) if norms else math.nan,
        "min_norm": min(norms, default=math.nan),
        "problems": problems,
        "parameters": parameters,
    }


def _counted(
    counts: dict[str, dict[str, int]], seen: GradSnapshot, i: int, hits: tuple[bool, bool, bool]
) -> dict[str, float]:
    """How often a parameter was in which trouble so far, and what its gradient is now; NaN where it got none."""
    mine = counts.setdefault(seen.names[i], dict.fromkeys(COUNTS, 0))
    for key, hit in zip(COUNTS, hits, strict=True):
        mine[key] += hit
    now = {"grad_norm": seen.norms[i], "grad_abs_mean": seen.abs_mean[i], "grad_abs_max": seen.absmax[i]}
    return {**mine, **{key: math.nan if hits[0] else float(value) for key, value in now.items()}}


def _problems(seen: GradSnapshot, none: Mask, zero: Mask, bad: Mask) -> list[str]:
    """One line for each parameter in trouble, in the model's order."""
    out = []
    for i in np.flatnonzero(none | zero | bad):
        if none[i]:
            what = "no gradient"
        elif bad[i]:
            what = f"{int(seen.nan[i])} NaN and {int(seen.inf[i])} Inf in the gradient"
        else:
            what = f"zero gradient (norm {seen.norms[i]:.2e})"
        out.append(f"{seen.names[i]}: {what}")
    return out


def _warn(norm: float, num_idle: int, num: int, problems: list[str]) -> None:
    for line in problems[:NUM_NAMED]:
        log.warning("[GRAD]   %s", line)
    if len(problems) > NUM_NAMED:
        log.warning("[GRAD]   and %d more", len(problems) - NUM_NAMED)
    if num and num_idle / num > ZERO_SHARE:
        log.warning("[GRAD] %d of %d parameters have a zero gradient or none", num_idle, num)
    if norm > HIGH_GLOBAL:
        log.warning("[GRAD] the global norm is %.2e, above %g: exploding?", norm, HIGH_GLOBAL)
    elif norm < LOW_GLOBAL:
        log.warning("[GRAD] the global norm is %.2e, below %g: vanishing?", norm, LOW_GLOBAL)
