"""GRAD004: gradients are exactly zero, step after step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.gradient_reach import active, never, without_routed
from trimtab.doctor.probe import Probe


class ZeroGradient:
    """Gradients are exactly zero, step after step.

    ## What it means
    A weight with a zero gradient does not learn: dead units, a mask that hides everything, a factor of 0 in the loss,
    or a rounding or comparison on the way.

    ## How it is checked
    Over several steps and batches at the full learning rate, so that a branch or head that begins at zero, or a LoRA
    pair, has had time to move. Biases, whose gradient may vanish by design (before a normalisation), do not count.

    ## What to try
    1. Look for `argmax`, `round`, comparisons or `.sign()` between these weights and the loss.
    2. Check masks and loss weights: are they all 0?
    3. Look at the outputs of ReLU layers before them: all 0?
    """

    code: ClassVar[str] = "GRAD004"
    name: ClassVar[str] = "zero-gradient"
    title: ClassVar[str] = "no gradient is zero for good"
    causes: ClassVar[tuple[str, ...]] = ("weights-unchanged", "not-learning", "loss-ignores-input", "collapsed-output")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report gradients that stay zero."""
        if probe.no_steps:
            yield not_applicable(self, probe.no_steps)
            return
        mine = {n: p for n, p in active(probe).items() if p.dim() > 1}
        some = {n: p for n, p in mine.items() if n not in never(probe, mine, lambda norm: norm is not None)}
        still = never(probe, some, lambda norm: bool(norm))
        if still and probe.too_slow:
            yield not_applicable(self, f"{len(still)} are zero in the first steps; {probe.too_slow}")
            return
        if still:
            still = never(probe, some, lambda norm: bool(norm), more=True)
        still = without_routed(still, some)
        if still:
            loss = next((c.loss for c in probe.through if c.loss is not None), None)
            yield failed(
                self,
                f"{len(still)} of {len(some)} weights have a gradient of exactly 0 in every step.",
                f"{listed(tuple(still))}; the loss is {loss}",
                "# look for argmax, round, masks or factors of 0 between these weights and the loss",
                tuple(still)[:8],
                num=float(len(still)),
            )
        else:
            yield passed(self, f"{len(some)} of {len(some)} weights have one that is not zero")
