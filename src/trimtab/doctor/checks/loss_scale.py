"""WIRE029: the loss is multiplied by a very large or very small factor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.probe import Probe

LOW, HIGH = 1e-4, 1e3


class LossScale:
    """The loss is multiplied by a very large or very small factor.

    ## What it means
    Plain SGD takes steps as many times too long or too short; with Adam a tiny loss drowns in its epsilon. A sum over
    the batch makes the learning rate depend on the batch size.

    ## How it is checked
    The factor with which a mean loss enters the backward pass, as autograd knows it, without that of a GradScaler.

    ## What to try
    1. `reduction="mean"`, and no factor but that of accumulation.
    """

    code: ClassVar[str] = "WIRE029"
    name: ClassVar[str] = "loss-scale"
    title: ClassVar[str] = "the loss has a sane scale"
    causes: ClassVar[tuple[str, ...]] = (
        "learning-rate",
        "not-learning",
        "initial-loss",
        "weights-unchanged",
        "optimizer-settings",
        "zero-gradient",
        "gradient-underflow",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report odd factors."""
        passes = [e for e in probe.events("backward") if e.facts.get("kind") and e.facts.get("factors")]
        if not passes:
            yield not_applicable(self, "the scale of this loss is not known")
            return
        first = passes[0].facts
        factor = abs(first["factors"][0]) / first["scale"]
        largest = max((e.facts["update_ratio"] for e in probe.events("step")), default=0.0)
        evidence = f"the {first['kind']} loss ({first['reduction'] or 'unknown'}) enters with a factor of {factor:.3g}"
        if first["reduction"] == "mean" and factor > 0 and not LOW < factor < HIGH:
            yield failed(
                self,
                f"the loss is multiplied by {factor:.3g}.",
                evidence,
                "loss = loss_fn(output, y)  # without a factor",
                ("loss",),
                factor=factor,
            )
        elif first["reduction"] == "sum" and first["kind"] == "nll" and factor > 0.5 and largest > 0.05:
            yield warned(
                self,
                "the loss is a sum over the batch: steps grow with the batch size.",
                f"{evidence}; a step moves the weights by {largest:.0%} of their size",
                'F.cross_entropy(output, y, reduction="mean")',
                ("loss",),
                factor=factor,
            )
        else:
            yield passed(self, evidence)
