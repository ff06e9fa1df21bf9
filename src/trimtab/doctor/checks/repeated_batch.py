"""DATA004: the loader gives the same batch again and again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class RepeatedBatch:
    """The loader gives the same batch again and again.

    ## What it means
    Most of the data is never seen: a cached iterator, a sampler that always draws the same indices, workers that all
    read the same part of a stream.

    ## How it is checked
    A fingerprint of every tensor of every batch of one pass through the loader. A loader of one batch is allowed.

    ## What to try
    1. Build the iterator once per epoch, not `next(iter(loader))` in each step.
    2. With an IterableDataset and several workers give each worker its own part.
    """

    code: ClassVar[str] = "DATA004"
    name: ClassVar[str] = "repeated-batch"
    title: ClassVar[str] = "batches differ within an epoch"
    causes: ClassVar[tuple[str, ...]] = ("targets-do-not-predict",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report batches that came before."""
        scan = probe.scan
        if scan.num < 2 or not scan.leaves or probe.watched_only:
            yield not_applicable(self, f"{scan.num} batch was seen")
            return
        varied = [leaf for leaf in scan.leaves.values() if len(leaf.prints) == scan.num]
        marks = list(zip(*(leaf.prints for leaf in varied), strict=True))
        again = len(marks) - len(set(marks))
        constant = all(leaf.constant for leaf in varied)
        if again and not constant and (scan.size or 0) >= 2 and again >= max(1, 0.1 * len(marks)):
            yield failed(
                self,
                f"{again} of {len(marks)} batches are exact copies of others in the same pass through the loader.",
                f"{len(set(marks))} different batches of {scan.size} samples",
                "for batch in loader: ...  # not next(iter(loader)), and a sampler without repetition",
                ("loader",),
                num=float(again),
            )
        else:
            yield passed(self, f"{len(set(marks))} different batches among {scan.num}")
