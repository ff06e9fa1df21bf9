"""DATA001: the batch itself holds NaN or Inf."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed, of_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class NonfiniteInput:
    """The batch itself holds NaN or Inf.

    ## What it sees
    An input of the model, or a target told through `batch`, holds a non-finite value.

    ## Why it matters
    Whatever follows (a NaN loss, NaN gradients, broken running statistics) comes from here. Changing the model will
    not help.

    ## What to try
    1. Find the sample: check the data set once for NaN and Inf, and each transformation that divides or takes a
       logarithm.
    2. Drop or repair such samples when loading.
    3. Missing values in tables arrive as NaN: fill them, or mask them.
    """

    code: ClassVar[str] = "DATA001"
    name: ClassVar[str] = "nonfinite-input"
    needs: ClassVar[tuple[str, ...]] = ("in_bad",)
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on non-finite data."""
        num = window.scalar("in_bad")
        if num:
            ranks = window.now.notes.get("in_bad_ranks", ())
            samples = window.now.notes.get("in_bad_samples", ())
            which = f", in {listed(samples)}" if samples else ""
            message = f"a tensor of this batch holds NaN or Inf{of_ranks(ranks)}{which}."
            yield found(self, window, message, ("batch", *ranks, *samples), num_tensors=num)
