"""AMP001: the GradScaler skips one step after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleCollapse:
    """The GradScaler skips one step after another.

    ## What it sees
    At least `skips` steps in a row overflowed and the scale has fallen to `scale` or below; or the scale is below 1; or
    `most` of the last 64 steps were skipped, whatever the scale. A scaler that looks for its scale (a high start, a few
    skips now and then) is doing its job: from the highest usual start, 2^24, it needs 24 skips.

    ## Why it matters
    Gradients that overflow at any scale are infinite by themselves: nothing has been learned since the skips began,
    and no error was raised.

    ## What to try
    1. Find the infinite value: run one step in float32 and look at the loss and the gradients.
    2. Keep the loss and reductions over many values in float32 (`loss.float()`), sums of squares in particular.
    """

    code: ClassVar[str] = "AMP001"
    name: ClassVar[str] = "scale-collapse"
    needs: ClassVar[tuple[str, ...]] = ("nonfinite_grads",)
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    skips: int = 8
    scale: float = 128.0
    most: int = 40

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when skipping does not help."""
        scale = window.scalar("scale")
        if scale is None or not (window.scalar("routine_overflow") or window.scalar("nonfinite_grads")):
            return
        skipped = [True, *(_overflowed(scalars) for scalars in reversed(window.past))]
        row = next((i for i, bad in enumerate(skipped) if not bad), len(skipped))
        if (row >= self.skips and scale <= self.scale) or (row >= 2 and scale < 1.0):
            told = (
                f"{row} steps in a row overflowed, and the loss scale has fallen to {scale:.4g}: "
                "no scale is small enough."
            )
        elif sum(skipped) >= self.most:
            told = (
                f"{sum(skipped)} of the last {len(skipped)} steps overflowed and were skipped: hardly any update "
                f"reaches the weights. The loss scale is {scale:.4g}."
            )
        else:
            return
        yield found(self, window, told, scale=scale, skips=max(row, sum(skipped)))


def _overflowed(scalars: Mapping[str, float]) -> bool:
    return bool(scalars.get("routine_overflow") or scalars.get("nonfinite_grads"))
