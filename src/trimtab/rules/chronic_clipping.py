"""GRAD007: clipping is active on every step and takes away almost everything."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.harm import is_fixed_objective
from trimtab.core.schedule import rates_of
from trimtab.core.screen import Bounds
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


def _coef(scalars: Mapping[str, float]) -> float | None:
    """What the guard and the loop left of the gradient together."""
    if scalars.get("rejected") or scalars.get("scaler_skipped"):
        return None
    handed, mine = scalars.get("handed"), scalars.get("clip_coef")
    if handed is not None and 0 < handed < 0.1 and abs(math.log2(handed) - round(math.log2(handed))) < UNSCALED:
        handed = None  # a loss scale that the guard was not told of, taken out again: no clipping ends at such numbers
    if handed is None and mine is None:
        return None
    # A wrong sign is another trouble, with a rule of its own.
    return min(abs(handed) if handed is not None else 1.0, 1.0) * (mine if mine is not None else 1.0)


UNSCALED = 1e-3
"""Loss scales are powers of two: so near to one lies what is left of a gradient after unscaling."""
HARDLY = 1e-5
"""Updates of at most this share of the weights are next to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChronicClipping:
    """Clipping is active on every step and takes away almost everything.

    ## What it sees
    In the last `span` steps nearly every gradient was clipped, by the guard or by the loop itself, and the median of
    what was left is below `coef` of the gradient. A few clipped steps, or a gentle clip on most of them, are normal.
    Where the objective may move (reinforcement learning, games of two models) a clip at every step is often the
    recipe: there it counts if the weights never moved to speak of, or if less than `nothing` is left.

    ## Why it matters
    Clipping is meant for the exception. Where it always acts it only hides the disease: the step no longer depends on
    the size of the gradient, and the rate really used is the learning rate times the clip coefficient.

    ## What to try
    1. Find out why the gradient norm before clipping is this large: a sum instead of a mean in the loss,
       unnormalised inputs or targets, a missing normalisation layer.
    """

    code: ClassVar[str] = "GRAD007"
    name: ClassVar[str] = "chronic-clipping"
    needs: ClassVar[tuple[str, ...]] = ("clip_coef", "handed")
    hold: ClassVar[int] = 20
    every: ClassVar[int] = 5
    severity: Severity = Severity.WARN
    coef: float = 0.02
    span: int = 20
    nothing: float = 1e-4

    def silent_while(self, window: Window) -> Bounds:
        """A step that both, the guard and the loop, leave this much of its gradient is not clipped hard."""
        least = math.sqrt(10.0 * self.coef) * (1.0 + 1e-9)
        return {"handed": (least, math.inf), "clip_coef": (least, math.inf)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the usual clip coefficient is tiny."""
        now = _coef(window.now.scalars)
        if len(window.past) < self.span - 1 or (now is not None and now > 10.0 * self.coef):
            return
        coefs = [c for c in map(_coef, (*list(window.past)[-(self.span - 1) :], window.now.scalars)) if c is not None]
        if len(coefs) < 4:
            return
        coefs.sort()
        median = coefs[len(coefs) // 2]
        if median >= self.coef or coefs[int(0.95 * (len(coefs) - 1))] > 0.9:
            return
        if median >= self.nothing and _is_recipe(window):
            return
        rates, clipped = rates_of(window.now.scalars), sum(c < 1.0 for c in coefs)
        effective = max(rates) * median if rates else None
        rate = f" With a learning rate of {max(rates):.3g} the effective one is {effective:.3g}." if rates else ""
        yield found(
            self,
            window,
            f"gradients were clipped in {clipped} of the last {len(coefs)} steps, usually to {median:.2%} of their "
            f"norm: clipping only hides that they are {1 / max(median, 1e-30):.3g} times too large.{rate}",
            coef=median,
            num_clipped=clipped,
            num_steps=len(coefs),
            effective_lr=effective,
        )


def _is_recipe(window: Window) -> bool:
    """Whether the objective may move and the weights moved well all the same, if only before the rate went down."""
    ratios = window.history("update_ratio")
    return not is_fixed_objective(window) and (not len(ratios) or ratios.highest > HARDLY)
