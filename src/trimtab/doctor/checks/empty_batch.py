"""DATA005: a batch holds nothing, or the loader has no batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class EmptyBatch:
    """A batch holds nothing, or the loader has no batch.

    ## What it means
    The mean over nothing is NaN, and a loader without batches trains nothing, without any error.

    ## How it is checked
    Every tensor of every batch is asked for its number of elements.

    ## What to try
    1. Print `len(dataset)`: is the path right, did a filter remove everything?
    2. `drop_last=True` with fewer samples than one batch leaves no batch.
    """

    code: ClassVar[str] = "DATA005"
    name: ClassVar[str] = "empty-batch"
    title: ClassVar[str] = "no batch is empty"
    causes: ClassVar[tuple[str, ...]] = (
        "step-exception",
        "shape-mismatch",
        "nonfinite-loss",
        "zero-gradient",
        "loss-ignores-input",
        "not-learning",
        "label-range",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report tensors without elements."""
        scan = probe.scan
        if probe.watched_only and not scan.num:
            yield not_applicable(self, "the script reads its own data")
            return
        if not scan.num and not scan.error:
            yield failed(
                self,
                "the loader has no batch: nothing would be trained.",
                "0 batches",
                "assert len(dataset) >= batch_size  # or drop_last=False",
                ("loader",),
            )
            return
        found = {path: leaf.empty for path, leaf in scan.leaves.items() if leaf.empty}
        if found:
            path, where = next(iter(found.items()))
            yield failed(
                self,
                f"tensor {path or 'of the batch'} has no elements in {len(where)} of {scan.num} batches.",
                f"first in batch {where[0]}, shape {scan.leaves[path].shape} in batch 0",
                "batch = [b for b in batch if len(b)]  # in the collate_fn",
                (path,),
            )
        if not found:
            sizes = ", ".join(f"{p or 'batch'} {tuple(leaf.shape)}" for p, leaf in list(scan.leaves.items())[:4])
            yield (
                passed(self, f"{scan.num_seen}: {sizes}")
                if scan.leaves
                else not_applicable(self, "the batches hold no tensors")
            )
