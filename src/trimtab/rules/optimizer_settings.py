"""WIRE016: a setting of the optimizer takes away what it is there for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import ClassVar

from trimtab.core.types import Finding, Kind, Severity
from trimtab.core.window import Window, found

USUAL = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """A setting of the optimizer takes away what it is there for.

    ## What it sees
    In the thorough looks: a momentum (or the first of Adam's betas) of `kept` or more, which adds up hundreds of
    gradients; a first beta whose square is above the second one by `crossed`, so that the size of a gradient is
    forgotten before its direction; or an eps that has been `times` the usual gradient of a weight since the run began,
    with steps that hardly move anything (`moving` of the weights).

    ## Why it matters
    With too much momentum a run overshoots and swings for hundreds of steps. With a large eps Adam no longer adapts: it
    is plain gradient descent at a rate of lr / eps. Neither is an error to PyTorch.

    ## What to try
    1. Use the usual values: momentum 0.9, betas (0.9, 0.999), eps 1e-8; check the order of positional arguments.
    2. If gradients are tiny because the loss is divided by a large number, undo that before you change eps.
    """

    code: ClassVar[str] = "WIRE016"
    name: ClassVar[str] = "optimizer-settings"
    needs: ClassVar[tuple[str, ...]] = ("momentum_kept", "moments_crossed", "eps")
    hold: ClassVar[int] = 120
    severity: Severity = Severity.WARN
    kept: float = 0.998
    crossed: float = 0.01
    times: float = 10.0
    moving: float = 1e-4

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on each of the three."""
        kept, crossed = window.scalar("momentum_kept") or 0.0, window.scalar("moments_crossed") or 0.0
        if kept >= self.kept:
            lasts = "without end" if kept >= 1 else f"over about {1.0 / (1.0 - kept):.0f} steps"
            yield found(
                self,
                window,
                f"the momentum is {kept:g} (usually {USUAL:g}): gradients are added up {lasts}.",
                ("momentum",),
                momentum=kept,
                usual=USUAL,
            )
        if crossed > self.crossed:
            yield found(
                self,
                window,
                f"the square of the first beta is {crossed:.3g} above the second one: it should be below. The "
                "size of gradients is forgotten before their direction.",
                ("betas",),
                crossed=crossed,
            )
        yield from self._eps(window)

    def _eps(self, window: Window) -> Iterator[Finding]:
        eps, norms, sample = window.scalar("eps"), window.level("grad_norm"), window.now
        ratios = window.last("update_ratio", 32)
        num = sum(sample.layout.numel[sample.layout.rows(Kind.GRAD)])
        if eps is None or len(ratios) < 4 or not num or not len(norms):
            return
        usual = max(norms.now, norms.start) / math.sqrt(num)
        if not 0 < usual * self.times < eps or not median(ratios) < self.moving:
            return
        yield found(
            self,
            window,
            f"eps is {eps:g}, and the gradient of a weight is usually {usual:.2g}: eps decides how far a step goes, "
            f"and a step changes the weights by only {median(ratios):.2g} of their size.",
            ("eps",),
            eps=eps,
            gradient=usual,
            update_ratio=median(ratios),
        )
