"""ACT002: most units of a bounded activation are at its limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturatedUnits:
    """Most units of a bounded activation are at its limits.

    ## What it sees
    With `activations = true`: more than `share` of the units of a layer, and at least `units` of them, were saturated
    in nine of ten looks, five forwards apart, and also in the ten before. A unit is saturated in a look when more than
    95 % of its values are: beyond 0.99 of tanh, below 0.01 or above 0.99 of a sigmoid. Judged are Tanh, Sigmoid,
    Softsign, Hardtanh and Hardsigmoid modules, except where they give the answer of the model: there it is certainty.

    ## Why it matters
    The slope of an activation is almost 0 at its limits. Hardly any gradient gets through, the layers before it stop
    learning, and each unit says only yes or no.

    ## What to try
    1. Normalise the inputs, or put a normalisation before the activation.
    2. Use weight decay: weights that grow too large drive the activation to its limits.
    """

    code: ClassVar[str] = "ACT002"
    name: ClassVar[str] = "saturated-units"
    needs: ClassVar[tuple[str, ...]] = ("saturated_lasting",)
    hold: ClassVar[int] = 75  # a window ends about every 50 steps
    severity: Severity = Severity.WARN
    share: float = 0.8
    units: int = 4

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the share of saturated units has been large for two windows."""
        lasting, num = window.scalar("saturated_lasting"), window.scalar("saturated_units")
        if lasting is None or num is None or not lasting > self.share or num < self.units:
            return
        layers, place = window.now.notes.get("saturated", ()), int(window.scalar("saturated_layer") or 0)
        layer, of = layers[place] if place < len(layers) else "a layer", window.scalar("saturated_of") or num
        yield found(
            self,
            window,
            f"{layer}: {num:.0f} of {of:.0f} units are saturated, and have been for two windows of looks.",
            (layer,),
            share=num / of,
            lasting=lasting,
            num_units=num,
        )
