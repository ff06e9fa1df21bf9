"""DATA002: the inputs of this batch are of another size than all before."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window, found

ROW_GROWTH = 10.0
"""So many times its usual norm the gradient of some tensor has every now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierBatch:
    """The inputs of this batch are of another size than all before.

    ## What it sees
    The root mean square of the input is more than `ratio` times the largest of the recent batches and far above the
    usual one (`z` robust deviations of its logarithm), and it needs `min_history` batches to know what is usual.
    `harm` in the evidence says what it did to the weights: not above 1 where loss, gradient and update were within
    what they lately were, as behind a BatchNorm, which hides the size of its input.

    ## Why it matters
    A batch that was not normalised, raw pixel values of 0 to 255, a corrupted file: one such batch can throw a model
    back by hours, and BatchNorm hides it from the loss.

    ## What to try
    1. Look at the samples of this step.
    2. Check that every path of the data pipeline normalises, the rarely used one too.
    """

    code: ClassVar[str] = "DATA002"
    name: ClassVar[str] = "outlier-batch"
    needs: ClassVar[tuple[str, ...]] = ("in_rms",)
    hold: ClassVar[int] = 10
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR
    ratio: float = 6.0
    z: float = 8.0
    min_history: int = 10

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the input jumps in size."""
        size, history = window.scalar("in_rms"), window.history("in_rms")
        if size is None or len(history) < self.min_history or not size > self.ratio * history.recent_max > 0:
            return
        z = history.log_z(size) if math.isfinite(size) else math.inf
        if z < self.z:
            return
        before = window.earlier("in_rms")
        yield found(
            self,
            window,
            f"the inputs of this batch have a root mean square of {size:.4g} ({before.range()}).",
            ("batch",),
            rms=size,
            usual=before.usual,
            highest=before.highest,
            z=z,
            harm=_harm(window),
        )


def _harm(window: Window) -> float:
    """How far this step lies beyond the recent ones: in loss, in gradient (of any row) or in what it changed."""
    now = window.now
    parts = []
    for name in ("loss", "grad_norm", "update_ratio"):
        value, history = now.scalars.get(name), window.history(name)
        if value is not None and len(history):
            parts.append(value / max(history.recent_max, 1e-30) if math.isfinite(value) else math.inf)
    growth = window.gradients.growth(now.names(Kind.GRAD), now.col(Kind.GRAD, Column.L2))
    parts += [float(growth.max()) / ROW_GROWTH] if growth.size else []
    return max(parts) if "grad_norm" in now.scalars else math.inf
