"""GRAD001: a gradient holds NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window

NUM_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteGradient:
    """At least one gradient holds NaN or Inf.

    ## What it sees
    The L2 norm of a parameter's gradient is not finite, and a second look confirms NaN or Inf values (a norm can also
    overflow on huge finite values: those are clipped or reported as exploding, not rejected). Overflows that a
    GradScaler provokes on purpose while it looks for its scale (finite loss, non-finite scaled gradients) are routine
    and stay silent.

    ## Why it matters
    Through the global norm or the optimizer's moments one bad value reaches every weight. `clip_grad_norm_` makes it
    worse: its coefficient becomes NaN and spreads to every parameter.

    ## What to try
    1. Compare the parameters that are named with the others: the cause lies where gradients, on their way back from
       the loss, turn bad.
    """

    code: ClassVar[str] = "GRAD001"
    name: ClassVar[str] = "nonfinite-gradient"
    needs: ClassVar[tuple[str, ...]] = ("nonfinite_grads",)
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a gradient is not finite and no scaler provoked it."""
        sample = window.now
        if window.scalar("routine_overflow") or not window.scalar("nonfinite_grads"):
            return
        norms = sample.col(Kind.GRAD, Column.L2)
        nans, infs = sample.col(Kind.GRAD, Column.NAN), sample.col(Kind.GRAD, Column.INF)
        bad = np.flatnonzero((nans > 0) | (infs > 0) if nans.size else ~np.isfinite(norms))
        names = tuple(sample.names(Kind.GRAD)[i] for i in bad[:NUM_NAMED])
        evidence = {"num_tensors": float(bad.size), "num_measured": float(norms.size)}
        counts = ""
        if nans.size:
            evidence |= {"num_nan": float(nans.sum()), "num_inf": float(infs.sum())}
            counts = f" ({int(nans.sum())} NaN, {int(infs.sum())} Inf)"
        kept = " The update was kept out of the weights." if window.scalar("rejected") else ""
        first = f", first {names[0]}" if names else ""
        yield Finding(
            code=self.code,
            name=self.name,
            step=sample.step,
            severity=self.severity,
            message=f"{bad.size} of {norms.size} gradients hold NaN or Inf{counts}{first}.{kept}",
            subject=names,
            evidence=evidence,
        )
