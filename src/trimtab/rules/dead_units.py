"""ACT001: most units of a layer are never active."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadUnits:
    """Most units of a layer are never active.

    ## What it sees
    With `activations = true`: more than `share` of the units of a layer, and at least `units` of them, were not active
    for any sample or position in ten looks, five forwards apart, and neither in the ten before. A unit that is active
    for a single rare sample is not dead. Judged are ReLU, ReLU6, ELU, GELU and SiLU modules; a LeakyReLU cannot die.
    Without that setting: the gradient of more than `asleep` of a layer's biases was exactly 0 in six looks, 20 steps
    apart, and neither all of them nor fewer than 16 units are concerned.

    ## Why it matters
    No gradient flows through a dead unit, so it does not come back by itself: what is left of the layer is a much
    smaller one, and the loss curve does not say so.

    ## What to try
    1. Check the biases and the normalisation before the layer: a large negative bias kills every unit.
    2. Re-initialise the dead units, or go back to a checkpoint from before they died.
    """

    code: ClassVar[str] = "ACT001"
    name: ClassVar[str] = "dead-units"
    needs: ClassVar[tuple[str, ...]] = ("dead_lasting", "asleep_share")
    hold: ClassVar[int] = 75  # a window ends about every 50 steps
    severity: Severity = Severity.WARN
    share: float = 0.5
    units: int = 8
    asleep: float = 0.8

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the share of dead units has been large for two windows, or nearly no unit has a gradient."""
        yield from self._without_gradient(window)
        lasting, num = window.scalar("dead_lasting"), window.scalar("dead_units")
        if lasting is None or num is None or not lasting > self.share or num < self.units:
            return
        layers, place = window.now.notes.get("dead", ()), int(window.scalar("dead_layer") or 0)
        layer, of = layers[place] if place < len(layers) else "a layer", window.scalar("dead_of") or num
        yield found(
            self,
            window,
            f"{layer}: {num:.0f} of {of:.0f} units are dead; none of the last looks saw them active.",
            (layer,),
            share=num / of,
            lasting=lasting,
            num_units=num,
        )

    def _without_gradient(self, window: Window) -> Iterator[Finding]:
        share, of = window.scalar("asleep_share"), window.scalar("asleep_of")
        if share is None or of is None or not share > self.asleep or window.scalar("dead_lasting") is not None:
            return
        (layer,) = window.now.notes.get("asleep", ("a layer",))
        yield found(
            self,
            window,
            f"{layer}: {share * of:.0f} of {of:.0f} units had no gradient in any of the last looks: nothing depends on "
            "what they put out.",
            (layer,),
            share=share,
            num_units=share * of,
        )
