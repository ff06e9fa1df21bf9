"""WGT005: two weights that were one are two now."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class UntiedWeights:
    """Two weights that were one are two now.

    ## What it means
    Tied weights share what they learn. After the tie broke (a copy, a new parameter, a `.to()` in the wrong place) each
    goes its own way, and one of them may be in no optimizer.

    ## How it is checked
    An embedding and an output layer of equal values in different memory, which random initialisation never gives; and
    ties that a step broke.

    ## What to try
    1. Tie after the model is complete and before the optimizer is built: `head.weight = embed.weight`.
    """

    code: ClassVar[str] = "WGT005"
    name: ClassVar[str] = "untied-weights"
    title: ClassVar[str] = "tied weights are still tied"
    causes: ClassVar[tuple[str, ...]] = ("checkpoint-round-trip",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report broken ties."""
        broken = (*probe.split_twins, *probe.broken_ties)
        if broken:
            yield failed(
                self,
                "weights that are meant to be one are two.",
                f"{listed(broken)}: equal values, different memory",
                "head.weight = embed.weight",
                broken[:8],
            )
        elif probe.num_ties:
            yield passed(self, f"{probe.num_ties} tied pairs, before and after {probe.num_steps} steps")
        else:
            yield not_applicable(self, "no weights are tied")
