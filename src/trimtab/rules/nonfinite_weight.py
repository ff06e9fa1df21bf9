"""WGT001: a weight is NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.core.screen import Bounds
from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window, found, listed

NUM_NAMED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteWeight:
    """At least one weight is NaN or Inf.

    ## What it sees
    Part of every weight is compared after each step; all of them are measured every `full_every` steps and, at once, in
    any step whose loss or gradient looks wrong. A weight that is not finite is named.

    ## Why it matters
    From here every forward pass is poisoned; skipping steps cannot fix it. The weights must come from before.

    ## What to try
    1. Go back to the last good checkpoint; do not save this state over it.
    2. If the guard was attached from the start, look for code that writes to weights outside the optimizer: an EMA
       swap, a manual initialisation, a loaded checkpoint.
    """

    code: ClassVar[str] = "WGT001"
    name: ClassVar[str] = "nonfinite-weight"
    calm: ClassVar[bool] = True
    wakes: ClassVar[Mapping[str, Bounds | None]] = {"weights_bad": None}
    severity: Severity = Severity.FATAL

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a measured weight is not finite."""
        sample = window.now
        if not sample.has(Kind.WEIGHT, Column.NAN):
            if num := window.scalar("weights_bad"):
                some = sample.notes.get("weights_bad", ())
                yield found(self, window, f"weights hold NaN or Inf after this step: {listed(some)}.", some, num=num)
            return
        nans, infs = sample.col(Kind.WEIGHT, Column.NAN), sample.col(Kind.WEIGHT, Column.INF)
        bad = np.flatnonzero((nans > 0) | (infs > 0))
        if not bad.size:
            return
        names = tuple(sample.names(Kind.WEIGHT)[i] for i in bad[:NUM_NAMED])
        yield Finding(
            code=self.code,
            name=self.name,
            step=sample.step,
            severity=self.severity,
            message=f"{bad.size} of {nans.size} weights hold NaN or Inf, first {names[0]} "
            f"({int(nans.sum())} NaN and {int(infs.sum())} Inf values in all).",
            subject=names,
            evidence={"num_tensors": float(bad.size), "num_nan": float(nans.sum()), "num_inf": float(infs.sum())},
        )
