"""CON002: one encoder gives the same embedding for every input."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModalityCollapse:
    """One encoder gives the same embedding for every input.

    ## What it sees
    The model returns several tensors (one per modality), and one of them has hardly varied between the samples of a
    batch (`spread` of its mean square) in `persist` looks, while another one does.

    ## Why it matters
    A tower that answers with a constant carries no information; the loss stays near chance and the other towers have
    nothing to align with.

    ## What to try
    1. Check the inputs of that modality: are they constant, or normalised to nothing?
    2. Look for dead units and for a learning rate too high in that tower.
    3. Check that its gradient is not cut off.
    """

    code: ClassVar[str] = "CON002"
    name: ClassVar[str] = "modality-collapse"
    needs: ClassVar[tuple[str, ...]] = ("towers_spread",)
    hold: ClassVar[int] = 60
    severity: Severity = Severity.WARN
    spread: float = 1e-3
    persist: int = 2
    grace: int = 20

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when one of several outputs is constant."""
        looks = window.last("towers_spread", 10 * self.persist)[-self.persist :]
        others = window.last("towers_widest", 10 * self.persist)[-self.persist :]
        if window.scalar("towers_spread") is None or len(looks) < self.persist or not others:
            return
        varied = max(window.last("towers_spread", 64)) > 10.0 * self.spread
        if not varied and window.now.step < self.grace:
            return  # a tower may begin like this
        if max(looks) < self.spread and min(others) > 10.0 * self.spread:
            names = (f"output {int(window.scalar('tower') or 0)}",)
            yield found(
                self,
                window,
                f"{listed(names)} hardly differs between samples ({looks[-1]:.2g} of its size).",
                names,
                spread=looks[-1],
            )
