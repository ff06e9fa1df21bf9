"""What a snapshot of gradients means: which layers vanish, which explode, and what to do about it, in words."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trimtab.monitor.snapshot import GradSnapshot
from trimtab.record import lines

ISOLATED = 1e-4
"""A bias whose gradient is this much smaller per element than that of the weights beside it is zero by construction."""
MOSTLY = 0.5
"""Share of all gradients that must be exactly zero before that is trouble and not the way the model is built."""
NUM_NAMED = 4

Rows = NDArray[np.bool_]


def vanishing(seen: GradSnapshot, threshold: float) -> Rows:
    """Which parameters have a gradient below `threshold` that ought to be larger.

    Not those whose gradient is zero by construction: exactly zero (an embedding or a branch this batch did not use), or
    a bias that does nothing (before a BatchNorm, of attention keys) and gets rounding noise where the weights beside it
    get a real gradient. A weight matrix with a tiny gradient always counts; so does a bias in the company of such.
    """
    low = seen.present & (seen.norms < threshold) & (seen.norms > 0)
    if not low.any():
        return low
    rms, company = seen.rms, _company(seen)
    with np.errstate(invalid="ignore"):
        alone = ~_matrices(seen) & (rms < ISOLATED * company)
    out: Rows = low & ~alone
    return out


def mostly_zero(seen: GradSnapshot) -> bool:
    """Whether more than half of all gradients are exactly zero: the loss hardly depends on the model."""
    num = int(seen.present.sum())
    return num > 0 and int((seen.norms == 0).sum()) > MOSTLY * num


def recommendations(seen: GradSnapshot, vanishing_threshold: float, exploding_threshold: float) -> list[str]:
    """What is wrong and what to try, the gravest first; empty where nothing is.

    Example:
        >>> import torch
        >>> from trimtab.monitor.snapshot import snapshot
        >>> weight = torch.zeros(2, 2, requires_grad=True)
        >>> (400.0 * weight).sum().backward()
        >>> print(*recommendations(snapshot([weight]), 1e-7, 100.0))
        ⚠️ Exploding gradients detected (norm=800.00)!
           Consider: (1) Gradient clipping, (2) Reducing learning rate
    """
    if not seen.present.any():
        what = "every parameter is frozen" if len(seen.frozen) == len(seen.names) else "call this after loss.backward()"
        return [f"No gradients: {what}, before optimizer.step() and optimizer.zero_grad()."]
    out = _nonfinite(seen)
    if exploding_threshold < seen.global_norm < math.inf:
        out.append(lines.exploding(seen.global_norm))
    small = vanishing(seen, vanishing_threshold)
    if small.any():
        out.append(f"{lines.vanishing(float(seen.norms[small].min()))}\n   Layers: {_names(seen, small)}")
    elif mostly_zero(seen):
        zero = seen.norms == 0
        out.append(
            f"{lines.vanishing(0.0)}\n   {int(zero.sum())} of {int(seen.present.sum())} gradients are exactly zero: "
            f"{_names(seen, zero)}. Look for a detached loss, dead units, or gradients lost in float16"
        )
    if seen.absent:
        shown = ", ".join(seen.absent[:NUM_NAMED]) + (", ..." if len(seen.absent) > NUM_NAMED else "")
        out.append(
            f"{len(seen.absent)} trainable parameters have no gradient: {shown}. "
            "The loss does not depend on them: freeze them (requires_grad_(False)), or look for what cuts them off."
        )
    return out


def _nonfinite(seen: GradSnapshot) -> list[str]:
    out = []
    for word, counts in (("NaN", seen.nan), ("Inf", seen.inf)):
        rows = counts > 0
        if rows.any():
            out.append(
                f"CRITICAL: {word} in the gradients of {int(rows.sum())} of {int(seen.present.sum())} parameters: "
                f"{_names(seen, rows)}. Do not step. Try in this order: (1) a learning rate 10 times lower, (2) an "
                "epsilon in every normalisation, (3) a numerically stable loss, (4) clipping to 1.0, (5) a look for "
                "divisions by zero, logarithms and roots of zero"
            )
    return out


def _names(seen: GradSnapshot, rows: Rows) -> str:
    found = [seen.names[i] for i in np.flatnonzero(rows)]
    return ", ".join(found[:NUM_NAMED]) + (f" and {len(found) - NUM_NAMED} more" if len(found) > NUM_NAMED else "")


def _matrices(seen: GradSnapshot) -> Rows:
    """Parameters that mix features; not biases, which some models keep in more than one dimension."""
    wide = [sum(n > 1 for n in shape) >= 2 for shape in seen.shapes]
    return np.array(
        [w and "bias" not in name.rsplit(".", 1)[-1] for w, name in zip(wide, seen.names, strict=True)], bool
    )


def _company(seen: GradSnapshot) -> NDArray[np.float64]:
    """For each parameter the largest gradient per element of the matrices of its own module, or of those next to it."""
    rms = np.where(np.isfinite(seen.rms), seen.rms, 0.0)
    rows = np.flatnonzero(_matrices(seen))
    homes: dict[str, float] = {}
    for i in rows.tolist():
        home = seen.names[i].rpartition(".")[0]
        homes[home] = max(homes.get(home, 0.0), float(rms[i]))
    out = np.zeros(len(seen.names))
    for i, name in enumerate(seen.names):
        home = name.rpartition(".")[0]
        if home in homes:
            out[i] = homes[home]
        elif rows.size:
            place = int(np.searchsorted(rows, i))
            out[i] = rms[rows[max(place - 1, 0) : place + 1]].max()
    return out
