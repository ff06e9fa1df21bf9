"""AMP001: the GradScaler skips every step and its scale falls towards nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.found import found
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCollapse:
    """The GradScaler skips every step and its scale falls towards nothing.

    ## What it sees
    At least `skips` steps in a row overflowed and the scale has fallen to `scale` or below; or the scale is below 1.
    A scaler that looks for its scale (a high start, a few skips now and then) is doing its job.

    ## Why it matters
    Gradients that overflow at any scale are infinite by themselves: nothing has been learned since the skips began,
    and no error was raised.

    ## What to try
    1. Find the infinite value: run one step in float32 or bfloat16 and look at the loss and the gradients.
    2. Keep the loss and reductions over many values in float32 (`loss.float()`), sums of squares in particular.
    3. If the loss is finite and only huge, divide it; if the model diverged before, lower the learning rate and go
       back to a checkpoint.
    4. Use bfloat16, which needs no scaler.
    """

    code: ClassVar[str] = "AMP001"
    name: ClassVar[str] = "scale-collapse"
    needs: ClassVar[tuple[str, ...]] = ("nonfinite_grads",)
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    skips: int = 8
    scale: float = 128.0

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when skipping does not help."""
        scale = window.scalar("scale")
        if scale is None or not (window.scalar("routine_overflow") or window.scalar("nonfinite_grads")):
            return
        row = 1
        for scalars in reversed(window.past):
            if not (scalars.get("routine_overflow") or scalars.get("nonfinite_grads")):
                break
            row += 1
        if not ((row >= self.skips and scale <= self.scale) or (row >= 2 and scale < 1.0)):
            return
        yield found(
            self,
            window,
            f"{row} steps in a row overflowed, and the loss scale has fallen to {scale:.4g}: no scale is small enough.",
            scale=scale,
            skips=row,
        )
