"""DATA003: all samples are the same, or all targets are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe

MIN_ROWS = 8
"""With fewer samples being equal may be chance."""


class ConstantBatch:
    """All samples are the same, or all targets are.

    ## What it means
    There is nothing to learn from: a data set that always returns the same item, a picture that was never filled, a
    label column that was read wrongly, data sorted by class so that each batch holds one class only.

    ## How it is checked
    Every batch the loader gave. Of several inputs one that differs is enough (masks and positions are often constant).

    ## What to try
    1. Print two items of the data set: does `__getitem__` use its index?
    2. Shuffle the training loader.
    """

    code: ClassVar[str] = "DATA003"
    name: ClassVar[str] = "constant-batch"
    title: ClassVar[str] = "samples and targets differ"
    causes: ClassVar[tuple[str, ...]] = (
        "loss-ignores-input",
        "not-learning",
        "targets-do-not-predict",
        "repeated-batch",
        "zero-gradient",
        "dead-units",
        "collapsed-output",
        "class-balance",
        "initial-loss",
        "gradcheck",
        "class-balance",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report data without differences."""
        scan, roles = probe.scan, probe.roles if probe.scan.batches else None
        if roles is None or not scan.leaves:
            yield not_applicable(self, "there are no tensors to look at")
            return
        inputs = [scan.leaves[p] for p in roles.fed or roles.inputs if p in scan.leaves and p not in roles.targets]
        if inputs and all(leaf.constant for leaf in inputs) and sum(leaf.num_rows for leaf in inputs) >= MIN_ROWS:
            yield failed(
                self,
                "all samples are the same: there is nothing to tell apart.",
                f"{inputs[0].num_rows} equal samples from {inputs[0].low:.4g} to {inputs[0].high:.4g}",
                "return self.data[index]  # does __getitem__ use its index?",
                roles.inputs,
            )
            return
        copies = [leaf for leaf in inputs if leaf.flat_batches == leaf.num_batches >= 2]
        if inputs and len(copies) == len(inputs) and (scan.size or 0) >= 4:
            yield failed(
                self,
                "all samples of a batch are copies of one.",
                f"in {copies[0].num_batches} of {scan.num} batches of {scan.size}",
                "torch.stack([dataset[i][0] for i in indices])  # does the collate_fn use every item?",
                roles.inputs,
            )
            return
        for path in roles.targets:
            leaf = scan.leaves[path]
            same = leaf.constant and leaf.low == leaf.high and leaf.num_rows >= MIN_ROWS
            if same and roles.sure:
                yield failed(
                    self,
                    f"all targets are the same ({leaf.low:g}).",
                    f"{leaf.num_rows} targets in {scan.num_seen}",
                    "print(dataset.targets[:20])  # is the label column the right one?",
                    (path,),
                )
                return
            sorted_ = leaf.label_like and leaf.one_value_batches == leaf.num_batches >= 4 and len(leaf.counts) > 1
            if sorted_ and leaf.num_rows >= 8 * leaf.num_batches:
                yield failed(
                    self,
                    "every batch holds one class only: the data are sorted and not shuffled.",
                    f"{leaf.num_batches} batches of {leaf.num_rows // leaf.num_batches}, {len(leaf.counts)} classes",
                    "DataLoader(dataset, batch_size, shuffle=True)",
                    (path,),
                )
                return
        differ = [leaf.path or "batch" for leaf in inputs if not leaf.constant]
        rows = inputs[0].num_rows if inputs else 0
        if rows < MIN_ROWS:
            yield not_applicable(self, f"only {rows} samples were seen")
        else:
            yield passed(self, f"{rows} samples differ in {', '.join(differ[:3])}")
