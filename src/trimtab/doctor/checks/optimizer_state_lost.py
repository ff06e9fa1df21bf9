"""OPT005: every step is made by a new optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class OptimizerStateLost:
    """Every step is made by a new optimizer.

    ## What it means
    An optimizer that is built inside the loop begins each step without moments: Adam becomes the sign of a gradient,
    momentum never builds up, and a scheduler changes the rate of an optimizer that is never stepped.

    ## How it is checked
    Which optimizers step: those that were given never do, and no two calls are stepped by the same one.

    ## What to try
    1. Build the optimizer once, before the loop, and return that one.
    """

    code: ClassVar[str] = "OPT005"
    name: ClassVar[str] = "optimizer-state-lost"
    title: ClassVar[str] = "one optimizer makes all steps"
    causes: ClassVar[tuple[str, ...]] = ("learning-rate", "not-learning", "resume-differs", "stale-gradient")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report optimizers that live for one step."""
        steps = probe.events("step")
        given = {id(o) for o in probe.target.optimizers}
        by = {e.who: {s.call for s in steps if s.who == e.who} for e in steps}
        if not steps:
            yield not_applicable(self, probe.no_steps)
        elif not given & set(by) and len(by) > 2 and all(len(calls) == 1 for calls in by.values()):
            yield failed(
                self,
                "every step is made by a new optimizer, without the moments of the last.",
                f"{len(by)} optimizers made {len(steps)} steps; the one that was given made none",
                "optimizer = torch.optim.Adam(model.parameters())  # once, before the loop",
                ("optimizer",),
                num=float(len(by)),
            )
        else:
            yield passed(self, f"{len(by)} made all {len(steps)} steps")
