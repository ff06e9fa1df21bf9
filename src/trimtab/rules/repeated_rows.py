"""DATA010: the same samples stand several times in each batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatedRows:
    """The same samples stand several times in each batch.

    ## What it sees
    At least half of the samples of a batch stand in it already, all their inputs included, in `looks` looks, 20 steps
    apart, while other batches bring other samples. Data that have few different samples are not meant, and neither are
    inputs of whole numbers: prompts are repeated on purpose.

    ## Why it matters
    The batch is smaller than it looks: loader workers that share one random state, a sampler that repeats indices, or a
    `repeat` in the wrong place. Gradients are noisier than the batch size says, and an epoch sees a part of the data.

    ## What to try
    1. Print the indices of one batch: does the sampler or the collate function repeat them?
    2. Give every loader worker its own seed (`worker_init_fn`), and shard an `IterableDataset` by `get_worker_info()`.
    """

    code: ClassVar[str] = "DATA010"
    name: ClassVar[str] = "repeated-rows"
    needs: ClassVar[tuple[str, ...]] = ("rows_repeated",)
    hold: ClassVar[int] = 100
    severity: Severity = Severity.WARN
    looks: int = 3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when it was seen several times."""
        share, looks = window.scalar("rows_repeated"), window.scalar("rows_repeated_looks") or 0.0
        if share is None or looks < self.looks:
            return
        yield found(
            self,
            window,
            f"{share:.0%} of the samples of this batch stand in it already, as in the last {looks:.0f} batches that "
            "were looked at.",
            ("batch",),
            share=share,
            looks=looks,
        )
