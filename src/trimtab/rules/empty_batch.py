"""DATA005: the batch has no samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class EmptyBatch:
    """The batch has no samples.

    ## What it sees
    The input of the model, or a target told through `batch`, has no elements.

    ## Why it matters
    The mean over nothing is NaN; sums give a step of pure weight decay and momentum. It comes from filters that leave
    nothing over, or from a last batch.

    ## What to try
    1. Skip empty batches in the loop, together with the step.
    2. Use `drop_last=True`, or a filter before batching.
    """

    code: ClassVar[str] = "DATA005"
    name: ClassVar[str] = "empty-batch"
    needs: ClassVar[tuple[str, ...]] = ("in_empty",)
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on nothing."""
        if window.scalar("in_empty"):
            yield found(self, window, "a tensor of this batch has no elements.", ("batch",))
