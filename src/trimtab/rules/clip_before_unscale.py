"""AMP003: gradients are clipped while they are still scaled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipBeforeUnscale:
    """Gradients are clipped while they are still scaled.

    ## What it sees
    With a GradScaler at work, the norm of the unscaled gradient times the scale is the same number in `persist`
    steps, to a thousandth, while the norm itself is tiny: the loop clips the scaled gradient to that number, and
    unscaling makes it smaller by the scale again.

    ## Why it matters
    The effective threshold is the threshold divided by the scale (65536 or so). Training crawls at a vanishing rate
    that changes whenever the scale does.

    ## What to try
    1. Call `scaler.unscale_(optimizer)` before `clip_grad_norm_`.
    """

    code: ClassVar[str] = "AMP003"
    name: ClassVar[str] = "clip-before-unscale"
    needs: ClassVar[tuple[str, ...]] = ("scale",)
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    persist: int = 4
    scale: float = 32.0
    norm: float = 0.02

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when norm times scale is a constant and the norm is tiny."""
        scale, norm = window.scalar("scale"), window.scalar("grad_norm")
        if scale is None or not scale >= self.scale or norm is None or not 0 < norm < self.norm:
            return
        used = [
            s for s in (*list(window.past)[-3 * self.persist :], window.now.scalars) if not s.get("nonfinite_grads")
        ]
        products = [s.get("scale", 0.0) * s.get("grad_norm", 0.0) for s in used][-self.persist :]
        if len(products) < self.persist or min(products) <= 0 or max(products) > 1.001 * min(products):
            return
        yield found(
            self,
            window,
            f"the gradient norm is {norm:.3g}, and times the loss scale ({scale:.6g}) it is {products[-1]:.4g} in "
            "every step: the loop clips before it unscales.",
            grad_norm=norm,
            scale=scale,
            threshold=products[-1],
        )
