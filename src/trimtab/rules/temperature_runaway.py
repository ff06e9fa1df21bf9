"""CON001: the temperature of a contrastive loss runs away."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class TemperatureRunaway:
    """The temperature of a contrastive loss runs away.

    ## What it sees
    A single-number parameter that is called scale or temperature (or tau) leaves the range in which a softmax still
    works: its value, or its exponential where the name says it is a logarithm, is above `high` or below `low`, or it
    grew past `growth` times where it began.

    ## Why it matters
    The model lowers the loss by sharpening the softmax instead of learning: gradients become those of a few hard
    pairs and then vanish or explode. CLIP bounds its scale at 100 for this reason.

    ## What to try
    1. Give it a smaller learning rate and no weight decay.
    2. Look for duplicates in the batch: false negatives push the temperature.
    """

    code: ClassVar[str] = "CON001"
    name: ClassVar[str] = "temperature-runaway"
    needs: ClassVar[tuple[str, ...]] = ("temperature",)
    hold: ClassVar[int] = 50
    severity: Severity = Severity.WARN
    high: float = 200.0
    low: float = 0.02

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a scale leaves all reason."""
        value = window.scalar("temperature")
        if value is None or self.low < value < self.high:
            return
        names = window.now.notes.get("temperature", ())
        yield found(self, window, f"the softmax scale {listed(names)} is {value:.4g}.", names, scale=value)
