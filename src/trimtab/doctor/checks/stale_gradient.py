"""GRAD006: gradients of an earlier step are still there in the next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class StaleGradient:
    """Gradients of an earlier step are still there in the next.

    ## What it means
    Every step goes along the sum of all gradients so far: the run behaves as with a momentum of 1, and leaves its
    course.

    ## How it is checked
    Each gradient is followed from the backward pass that made it. After a step it must be cleared before another
    backward pass adds to it. Several passes before one step (accumulation) are allowed; a pass that already served
    another optimizer is not.

    ## What to try
    1. `optimizer.zero_grad()` once per step, right before `backward()` or right after `step()`.
    2. With two optimizers clear the gradients of each before its own backward pass.
    """

    code: ClassVar[str] = "GRAD006"
    name: ClassVar[str] = "stale-gradient"
    title: ClassVar[str] = "gradients are zeroed between steps"
    causes: ClassVar[tuple[str, ...]] = ("learning-rate", "not-learning", "gradcheck", "accumulation-not-divided")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report gradients that were used before."""
        steps = [e for e in probe.events("step") if e.facts["fresh"]]
        if len(steps) < 2:
            yield not_applicable(self, probe.no_steps or "fewer than two steps were seen")
            return
        carried = [e for e in steps if e.facts["gradients"].carried]
        shared = [e for e in steps if e.facts["gradients"].shared_with is not None]
        if carried:
            num = carried[0].facts["gradients"].carried
            yield failed(
                self,
                "gradients are not zeroed between steps: each step uses those of the steps before once more.",
                f"{num} parameters still held the last gradient in {len(carried)} of {len(steps) - 1} steps",
                "optimizer.zero_grad()  # before loss.backward()",
                ("gradients",),
                num=float(num),
            )
        elif shared:
            yield failed(
                self,
                "an optimizer steps on gradients that another one's backward pass left behind.",
                f"{len(shared)} of {len(steps)} steps used a pass that had already served another optimizer",
                "optimizer_d.zero_grad()  # right before the backward pass that is meant for it",
                ("gradients",),
            )
        else:
            yield passed(self, f"cleared before each of {len(steps)} steps")
