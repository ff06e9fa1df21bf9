"""WGT007: the weights begin far too large or too small for their layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class InitialWeights:
    """The weights begin far too large or too small for their layers.

    ## What it sees
    In a model without normalisation layers: at the first step half of the layers amplify what comes in by more than
    `large` or less than `small` (usual initialisations: 0.5 to 1.5), and after 50 steps the gradients show that the
    inputs of a layer are really that large (`amplified`) or small (`faded`). Layers that are rescaled when they are
    used show neither. Or, in any model, the inputs and outputs of its layers show the same in the first steps.

    ## Why it matters
    Signals grow or fade by that factor from layer to layer, and gradients on their way back. Units saturate, first
    answers are extreme, or nothing arrives; the optimizer needs most of the run to repair it, if it can.

    ## What to try
    1. Use an initialisation that knows the width of the layer (`torch.nn.init.kaiming_normal_`, `orthogonal_`), not a
       fixed standard deviation; look for an initialisation that is applied twice.
    2. If the weights were loaded, check that they are not quantised values without their scale.
    """

    code: ClassVar[str] = "WGT007"
    name: ClassVar[str] = "initial-weights"
    needs: ClassVar[tuple[str, ...]] = ("start_gain", "first_gain")
    hold: ClassVar[int] = 100
    severity: Severity = Severity.WARN
    large: float = 6.0
    small: float = 0.03
    amplified: float = 3.0
    faded: float = 0.01
    moved: float = 0.3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when both the weights and what they did to the inputs are out of range."""
        gain, most = window.scalar("start_gain"), window.scalar("layer_input") or 0.0
        least = window.scalar("layer_input_least")
        if (direct := window.scalar("first_gain")) is not None:
            gain, most, least = direct, window.scalar("first_size") or 0.0, window.scalar("first_least")
        if gain is None or least is None:
            return
        if max(window.last("update_ratio", 8), default=0.0) > self.moved:
            return  # the first steps have changed them: what was measured are no initial weights any more
        large = gain > self.large and most > self.amplified
        if not large and not (gain < self.small and least < self.faded):
            return
        yield found(
            self,
            window,
            f"at the start the layers multiplied what came in by about {gain:.3g} (usually {USUAL[0]:g} to "
            f"{USUAL[1]:g}): the weights are far too {'large' if large else 'small'}.",
            ("weights",),
            gain=gain,
            input=most if large else least,
            usual=USUAL[0],
            usual_most=USUAL[1],
        )


USUAL = (0.5, 1.5)
