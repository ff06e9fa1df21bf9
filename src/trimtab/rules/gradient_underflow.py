"""AMP002: under float16 without a scaler most gradients become 0."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientUnderflow:
    """Under float16 without a scaler most gradients become 0.

    ## What it sees
    The forward ran under float16 autocast, no GradScaler is in use, and in most weight matrices more than `share` of
    the gradient is exactly 0 or too small for float16. Measured in the thorough looks, at the first step and every
    `full_every` steps.

    ## Why it matters
    float16 knows nothing below 6e-8. Gradients of deep layers are often smaller: they vanish in the backward pass,
    and those layers stop learning without any error.

    ## What to try
    1. Scale the loss: `torch.amp.GradScaler`, passed to the guard as `scaler=`.
    2. Or train under bfloat16, whose range is that of float32.
    """

    code: ClassVar[str] = "AMP002"
    name: ClassVar[str] = "gradient-underflow"
    needs: ClassVar[tuple[str, ...]] = ("autocast",)
    hold: ClassVar[int] = 120
    severity: Severity = Severity.WARN
    share: float = 0.4
    size: int = 64

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when float16 gradients are mostly gone."""
        if window.scalar("autocast") != 1.0 or window.scalar("scale") is not None:
            return
        sample = window.now
        if not sample.has(Kind.GRAD, Column.ZERO_FRAC):
            return
        lost = sample.col(Kind.GRAD, Column.ZERO_FRAC) + sample.col(Kind.GRAD, Column.UNDERFLOW_FRAC)
        sizes = np.array(sample.layout.numel[sample.layout.rows(Kind.GRAD)])
        big = (sizes >= self.size) & (sample.col(Kind.GRAD, Column.L2) >= 0) & np.isfinite(lost)
        if big.sum() < 2 or float(np.median(lost[big])) < self.share:
            return
        worst = np.argsort(-np.where(big, lost, -1.0), kind="stable")[:4]
        names = tuple(sample.names(Kind.GRAD)[i] for i in worst)
        yield found(
            self,
            window,
            f"half of the weight matrices have lost {float(np.median(lost[big])):.0%} or more of their gradient to "
            f"float16; worst {names[0]} ({float(lost[worst[0]]):.0%}). There is no GradScaler.",
            names,
            median_lost=float(np.median(lost[big])),
        )
