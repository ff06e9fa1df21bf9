"""WGT002: a buffer, such as a BatchNorm statistic, became NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window

NUM_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteBuffer:
    """A buffer that was finite became NaN or Inf.

    ## What it sees
    Buffers (BatchNorm's running statistics and the like) are compared with their copy from before the step. One that
    was finite and is not any more is named, and the guard puts the copy back. Buffers that are non-finite by design,
    such as a mask filled with -inf, are left alone. A bad buffer in a step whose gradients are bad too is part of that
    incident and goes back with it.

    ## Why it matters
    The training loss does not depend on running statistics, so training looks fine while every evaluation and every
    saved checkpoint is ruined.

    ## What to try
    1. Look at the batch of this step: one huge input overflows a variance.
    2. Check the inputs of the named layer; clamp or normalise them.
    """

    code: ClassVar[str] = "WGT002"
    name: ClassVar[str] = "nonfinite-buffer"
    needs: ClassVar[tuple[str, ...]] = ("bad_buffers",)
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a buffer went bad and the step's own rejection does not explain it."""
        sample = window.now
        if not window.scalar("bad_buffers") or (window.scalar("rejected") and window.scalar("nonfinite_grads")):
            return
        nans, infs = sample.col(Kind.BUFFER, Column.NAN), sample.col(Kind.BUFFER, Column.INF)
        bad = np.flatnonzero((nans > 0) | (infs > 0))
        names = tuple(sample.names(Kind.BUFFER)[i] for i in bad[:NUM_NAMED])
        restored = " It was put back." if window.scalar("buffers_restored") else ""
        yield Finding(
            code=self.code,
            name=self.name,
            step=sample.step,
            severity=self.severity,
            message=f"{bad.size} buffers became NaN or Inf, first {names[0]}.{restored}"
            if names
            else f"some buffer became NaN or Inf.{restored}",
            subject=names,
            evidence={"num_tensors": float(bad.size)},
        )
