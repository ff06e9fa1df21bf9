"""DIST001: processes that should hold the same weights do not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDiverged:
    """Processes that should hold the same weights do not.

    ## What it sees
    Every `full_every` steps each process computes a checksum over all bits of the weights that
    `DistributedDataParallel` keeps alike. The checksums of some ranks differ from those of the others. Parameters that
    DDP was told to ignore, sharded ones and local SGD do not count; weights on an accelerator are not read.

    ## Why it matters
    From then on every process computes gradients for another model, and their mean fits none of them. The loss on one
    rank looks usual for a long time; the checkpoint of rank 0 is a model that the others did not train. It does not
    heal: DDP compares weights once, when it is built.

    ## What to try
    1. Load checkpoints on every rank before `DistributedDataParallel` is built, not on rank 0 after it.
    2. Look for changes that depend on the rank: `if rank == 0:` around a step, clipping of single ranks, random
       re-initialisation with another seed, parameters created after DDP was built.
    3. Build the optimizer with the same settings, and step it equally often, on every rank.
    4. If it comes back at one rank alone, suspect that machine's memory: run its diagnostics.
    """

    code: ClassVar[str] = "DIST001"
    name: ClassVar[str] = "replicas-diverged"
    needs: ClassVar[tuple[str, ...]] = ("diverged",)
    hold: ClassVar[int] = 200
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire where a checksum differs."""
        if num := window.scalar("diverged"):
            ranks = window.now.notes.get("diverged", ())
            message = f"the weights of {listed(ranks, num)} are not those of the other processes."
            yield found(self, window, message, ranks, num_ranks=num)
