"""DATA001: the data hold NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.loader_scan import Leaf
from trimtab.doctor.probe import Probe


class NonfiniteInput:
    """The data hold NaN or Inf.

    ## What it means
    One such value makes the loss of its batch NaN, and with it every gradient, every weight and the running statistics
    of every normalisation layer.

    ## How it is checked
    Every float tensor of every batch is searched. Masks of 0 and -inf are allowed. Targets may hold NaN where the loss
    is seen to leave them out.

    ## What to try
    1. Find where it comes from: a division by zero, a logarithm of zero, a missing value in a table.
    2. Fill or drop such samples when the data are read, not in the training step.
    """

    code: ClassVar[str] = "DATA001"
    name: ClassVar[str] = "nonfinite-input"
    title: ClassVar[str] = "the data are finite"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report NaN and Inf in the batches."""
        scan = probe.scan
        bad = [leaf for leaf in scan.leaves.values() if leaf.nan or (leaf.inf and not leaf.mask_like)]
        floats = [leaf.path for leaf in scan.leaves.values() if leaf.is_float]
        bad = [leaf for leaf in bad if not self._left_out(probe, leaf)]
        for leaf in bad:
            where = sorted({*leaf.nan, *leaf.inf})
            num = sum(leaf.nan.values()) + sum(leaf.inf.values())
            role = "targets" if leaf.path in probe.roles.targets else "inputs"
            yield failed(
                self,
                f"the {role} (tensor {leaf.path or 'of the batch'}) hold {num} values that are NaN or Inf.",
                f"{sum(leaf.nan.values())} NaN and {sum(leaf.inf.values())} Inf in {len(where)} of {scan.num} batches, "
                f"first in batch {where[0]}",
                "assert torch.isfinite(x).all()  # in the data set, then drop or fill what it finds",
                (leaf.path,),
                num=float(num),
            )
        if not bad:
            yield (
                passed(self, f"{len(floats)} float tensors in {scan.num_seen}")
                if floats
                else not_applicable(self, "the batches hold no floats")
            )

    @staticmethod
    def _left_out(probe: Probe, leaf: Leaf) -> bool:
        """Targets that the loss is seen to leave out: it is finite on them, and so is every gradient."""
        first = min({*leaf.nan, *leaf.inf})
        if leaf.path not in probe.roles.targets or first >= len(probe.scan.batches):
            return False
        call = probe.once(probe.scan.batches[first])
        norms = call.grad_norms
        return call.loss is not None and math.isfinite(call.loss) and bool(norms) and all(map(math.isfinite, norms))
