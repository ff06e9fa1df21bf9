"""DIST004: several processes train on the same batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class DuplicatedData:
    """Several processes train on the same batches.

    ## What it sees
    For `persist` steps in a row all inputs of several ranks begin with the same values, bit for bit, while they change
    from step to step. An input that never changes, one of several that is the same on purpose, a single equal batch
    (the end of a short epoch) and tensor parallel ranks, which share a batch by design, do not count.

    ## Why it matters
    Every rank computes the same gradient, and their mean is that of one rank: the batch is as large as that of a single
    process, for the price of all. Learning rates that were scaled to the number of ranks are then too large.

    ## What to try
    1. Give the loader a `DistributedSampler(dataset)`, and call `sampler.set_epoch(epoch)` in every epoch.
    2. For an iterable data set, let each rank take its part: `islice(data, rank, None, world_size)`.
    3. If batches are drawn at random, seed them by rank: `torch.Generator().manual_seed(seed + rank)`.
    """

    code: ClassVar[str] = "DIST004"
    name: ClassVar[str] = "duplicated-data"
    needs: ClassVar[tuple[str, ...]] = ("same_data",)
    hold: ClassVar[int] = 100
    severity: Severity = Severity.WARN
    persist: int = 8

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on batches that stay the same across ranks."""
        if not window.streak("same_data", self.persist):
            return
        ranks = window.now.notes.get("same_data", ())
        message = f"{listed(ranks, window.scalar('same_data'))} have had the same batches for {self.persist} steps."
        yield found(self, window, message, ranks, num_ranks=window.scalar("same_data"))
