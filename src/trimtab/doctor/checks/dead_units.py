"""ACT001: most units of a layer output 0 for every input."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.probe import Probe

MIN_ROWS = 32
"""With fewer samples a unit may be 0 by chance."""
DEAD, MANY = 0.95, 0.8


class DeadUnits:
    """Most units of a layer output 0 for every input.

    ## What it means
    A ReLU whose input is always negative passes neither value nor gradient: a large negative bias, a bad initialisation
    or inputs of a far too large scale.

    ## How it is checked
    The outputs of every ReLU in the graph of the first losses, over all samples and positions, before anything is
    learned.

    ## What to try
    1. Biases begin at 0; weights by Kaiming initialisation; inputs normalised.
    2. GELU or LeakyReLU.
    """

    code: ClassVar[str] = "ACT001"
    name: ClassVar[str] = "dead-units"
    title: ClassVar[str] = "units are alive"
    causes: ClassVar[tuple[str, ...]] = (
        "zero-gradient",
        "collapsed-output",
        "loss-ignores-input",
        "not-learning",
        "missing-gradient",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report layers whose units are always 0."""
        found = [a for a in probe.facts.activations if a.kind == "relu" and a.num_rows >= MIN_ROWS]
        if not found:
            yield not_applicable(self, "no ReLU with enough samples is in the graph of the loss")
            return
        worst = max(found, key=lambda a: a.dead_frac)
        evidence = (
            f"{worst.dead_frac:.0%} of the units of an output of shape {worst.shape} are 0 for all of its samples"
        )
        if worst.dead_frac >= DEAD:
            yield failed(
                self,
                "nearly all units of a ReLU layer are dead.",
                evidence,
                "nn.init.zeros_(layer.bias); nn.init.kaiming_normal_(layer.weight)",
                ("relu",),
                share=worst.dead_frac,
            )
        elif worst.dead_frac >= MANY and worst.shape[-1] >= 32:
            yield warned(
                self,
                "most units of a ReLU layer are dead.",
                evidence,
                "nn.init.zeros_(layer.bias); nn.init.kaiming_normal_(layer.weight)",
                ("relu",),
                share=worst.dead_frac,
            )
        else:
            yield passed(self, f"{len(found)} ReLU outputs, at most {worst.dead_frac:.0%} dead")
