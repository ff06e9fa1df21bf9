"""DATA003: every sample of the batch is the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ConstantBatch:
    """Every sample of the batch is the same.

    ## What it sees
    All samples of the main input are equal, in `persist` batches in a row, or at once where batches used to differ. Or
    all targets of `one_class` batches in a row are one class, where they used to differ.

    ## Why it matters
    There is nothing to learn from it: a placeholder, a broken loader that returns zeros, a cache that was
    overwritten.

    ## What to try
    1. Look at what the loader returns for different indices.
    """

    code: ClassVar[str] = "DATA003"
    name: ClassVar[str] = "constant-batch"
    needs: ClassVar[tuple[str, ...]] = ("in_flat", "target_flat")
    hold: ClassVar[int] = 10
    severity: Severity = Severity.ERROR
    persist: int = 2
    one_class: int = 24

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on batches without differences."""
        if window.streak("target_flat", self.one_class) and not all(s.get("target_flat") for s in window.past):
            yield found(
                self, window, f"all targets of the last {self.one_class} batches were the same class.", ("targets",)
            )
        if not window.scalar("in_flat"):
            return
        varied = any("in_print" in s and not s.get("in_flat") for s in window.past)
        if not varied and not window.streak("in_flat", self.persist):
            return
        yield found(self, window, "all samples of this batch are equal.", ("batch",))
