"""ACT002: nearly all outputs of a sigmoid or tanh lie at its ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe

ENDS = 0.8


class SaturatedUnits:
    """Nearly all outputs of a sigmoid or tanh lie at its ends.

    ## What it means
    There the derivative is next to 0: what lies before it learns hardly anything. Weights or inputs are far too large.

    ## How it is checked
    The outputs of every sigmoid and tanh in the graph of the first losses; the output layer itself is left out.

    ## What to try
    1. Normalise the inputs; Xavier initialisation; a LayerNorm before it.
    """

    code: ClassVar[str] = "ACT002"
    name: ClassVar[str] = "saturated-units"
    title: ClassVar[str] = "units are not saturated"
    causes: ClassVar[tuple[str, ...]] = ("zero-gradient", "not-learning")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report layers at their ends."""
        last = probe.calls[0].output if probe.calls else None
        shape = None if last is None else tuple(last.shape)
        found = [a for a in probe.facts.activations if a.kind != "relu" and a.shape != shape]
        if not found:
            yield not_applicable(self, "no hidden sigmoid or tanh is in the graph of the loss")
            return
        worst = max(found, key=lambda a: a.saturated_frac)
        evidence = f"{worst.saturated_frac:.0%} of a {worst.kind} of shape {worst.shape} is within 0.001 of its ends"
        if worst.saturated_frac >= ENDS:
            yield failed(
                self, f"a {worst.kind} is saturated.", evidence, "nn.init.xavier_uniform_(layer.weight)", (worst.kind,)
            )
        else:
            yield passed(self, f"{len(found)} outputs, at most {worst.saturated_frac:.0%} at the ends")
