"""WIRE007: a step goes back through the graph of an earlier step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line
from trimtab.doctor.observed_step import failure_lines
from trimtab.doctor.probe import Probe


class GraphReused:
    """A step goes back through the graph of an earlier step.

    ## What it means
    Something computed in an earlier step is still connected to it: the hidden state of a recurrent net, a running loss,
    a cached output. Its graph is freed after its own backward pass.

    ## How it is checked
    PyTorch's own error, translated, with the line.

    ## What to try
    1. Detach what is carried from step to step: `hidden = hidden.detach()`.
    2. Add up `loss.item()`, not `loss`.
    """

    code: ClassVar[str] = "WIRE007"
    name: ClassVar[str] = "graph-reused"
    title: ClassVar[str] = "every step has a graph of its own"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Translate PyTorch's error."""
        return failure_lines(
            self,
            probe,
            "a step goes back through the graph of an earlier one",
            "hidden = hidden.detach()  # what is carried over from the last step",
        )
