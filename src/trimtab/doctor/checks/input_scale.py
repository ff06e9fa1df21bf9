"""WIRE035: inputs are far from the scale that layers are made for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, not_applicable, passed, warned
from trimtab.doctor.probe import Probe


class InputScale:
    """Inputs are far from the scale that layers are made for.

    ## What it means
    Initialisations expect inputs of about unit size. Pixels from 0 to 255, or raw sensor values, begin with huge
    outputs and learn slowly or not at all.

    ## How it is checked
    The size of float inputs that feed the model directly, and whether the model begins with a normalisation.

    ## What to try
    1. `x = (x - mean) / std`, or a BatchNorm in front.
    """

    code: ClassVar[str] = "WIRE035"
    name: ClassVar[str] = "input-scale"
    title: ClassVar[str] = "inputs have a sane scale"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report inputs of an odd scale."""
        scan = probe.scan
        floats = [scan.leaves[p] for p in probe.roles.inputs if scan.leaves[p].is_float] if scan.batches else []
        if not floats:
            yield not_applicable(self, "the inputs are no floats")
            return
        worst = max(floats, key=lambda leaf: max(abs(leaf.low), abs(leaf.high)))
        evidence = f"from {worst.low:.4g} to {worst.high:.4g}"
        first = next((m for m in probe.model.modules() if not list(m.children())), None)
        normed = first is not None and "Norm" in type(first).__name__
        image = len(worst.shape) == 4
        if not normed and (
            math.isfinite(worst.high) and max(abs(worst.low), abs(worst.high)) > (60.0 if image else 1e4)
        ):
            yield warned(
                self,
                "the inputs are far from unit scale.",
                evidence,
                "x = (x - x.mean()) / x.std()",
                (worst.path,),
                high=worst.high,
            )
        else:
            yield passed(self, evidence)
