"""DATA008: batches come a second time before the epoch is over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class DataReplayed:
    """Batches come a second time before the epoch is over.

    ## What it sees
    Batches that were seen before come again in the same order, `persist` in a row, earlier than the length of the
    loader allows (`loader=`), or right after a resume.

    ## Why it matters
    A resume that starts the epoch from the beginning, or a sampler that was not told the epoch, shows some samples
    twice and others never.

    ## What to try
    1. Save and restore the position of the loader: a StatefulDataLoader, or skip the batches already seen.
    2. Call `sampler.set_epoch(epoch)` with distributed samplers.
    3. Restore the random state before the loader is created.
    """

    code: ClassVar[str] = "DATA008"
    name: ClassVar[str] = "data-replayed"
    needs: ClassVar[tuple[str, ...]] = ("replayed",)
    hold: ClassVar[int] = 100
    severity: Severity = Severity.WARN
    persist: int = 3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on a repetition that no epoch explains."""
        row = window.scalar("replayed")
        if row is not None and row >= self.persist:
            yield found(
                self,
                window,
                f"the last {int(row)} batches were seen before, in the same order, in this epoch.",
                ("batch",),
                batches=row,
            )
