"""WIRE007: a step goes back through the graph of an earlier step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.checks.outcome import Line, failed, not_applicable, passed
from trimtab.checks.probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
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
        failure = probe.failure
        if failure is not None and probe.failed_as == self.name:
            where = f" in {failure.module}" if failure.module else ""
            yield failed(
                self,
                f"a step goes back through the graph of an earlier one{where}: {failure.text[:200]}",
                f"in the {failure.phase} pass of call {len(probe.calls) - 1}, at {failure.where or 'unknown'}",
                "hidden = hidden.detach()  # what is carried over from the last step",
                (failure.module,) if failure.module else (),
            )
        elif not probe.through:
            yield not_applicable(self, probe.no_steps)
        else:
            yield passed(self, f"{len(probe.through)} calls came to their end")
