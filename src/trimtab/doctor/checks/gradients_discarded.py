"""WIRE017: gradients are cleared before a step has used them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class GradientsDiscarded:
    """Gradients are cleared before a step has used them.

    ## What it means
    `zero_grad()` between `backward()` and `step()`: the step has nothing to go by. Or in every micro-batch of an
    accumulation: only the last one counts.

    ## How it is checked
    Each backward pass is followed to the step that uses it. Passes that served another optimizer, moved the weights by
    themselves or whose gradients were rewritten by hand (SAM, gradient surgery) are left alone.

    ## What to try
    1. `zero_grad()` once per step: right after `step()`, or before the first `backward()` of it.
    """

    code: ClassVar[str] = "WIRE017"
    name: ClassVar[str] = "gradients-discarded"
    title: ClassVar[str] = "every backward pass is used"
    causes: ClassVar[tuple[str, ...]] = (
        "weights-unchanged",
        "missing-gradient",
        "zero-gradient",
        "not-learning",
        "learning-rate",
        "optimizer-misses-parameters",
        "accumulation-not-divided",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report backward passes that no step uses."""
        total = len(probe.watch.pending.backwards)
        if probe.doctor_steps or not total or not probe.num_steps:
            yield not_applicable(self, probe.no_steps or "doctor itself clears the gradients here")
            return
        lost = probe.watch.pending.discarded()
        if len(lost) >= 2 and not probe.watch.pending.by_hand:
            yield failed(
                self,
                "gradients are cleared after backward() and before a step uses them.",
                f"{len(lost)} of {total} backward passes were used by no step; {probe.num_steps} steps in "
                f"{len(probe.calls)} calls",
                "loss.backward(); optimizer.step(); optimizer.zero_grad()",
                ("gradients",),
                num=float(len(lost)),
            )
        else:
            yield passed(self, f"{total - len(lost)} of {total} backward passes were used")
