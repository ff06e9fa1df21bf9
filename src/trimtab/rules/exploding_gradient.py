"""GRAD002: the gradient norm jumps far above its own history."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.core.harm import is_fixed_objective, one_step_did_harm
from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window

LOST = 0.02
"""Share of what was learned."""
NUM_NAMED = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplodingGradient:
    """The gradient norm is far above anything in its recent history.

    ## What it sees
    The global norm before clipping is more than `ratio` times the largest of the last 128 steps and at least `z`
    robust deviations (median and MAD of logs) above their median. Both are relative to the run's own history, so the
    scale of the loss does not matter. It needs `min_history` steps before it speaks. A run that has converged has tiny
    gradients: one below `least` of those at the start counts only if the loss shows that something is lost. Where the
    objective may move (reinforcement learning, games of two models) rare events give large gradients: one counts if
    the weights show it, or if it is far beyond the largest of the whole run.

    ## Why it matters
    Without clipping one such step can throw the weights out of the region they took hours to reach. With clipping the
    step is bounded, but its direction comes from whatever caused it.

    ## What to try
    1. See "Gradients by layer" in `trimtab report --html`: did one layer grow, or all of them?
    """

    code: ClassVar[str] = "GRAD002"
    name: ClassVar[str] = "exploding-gradient"
    needs: ClassVar[tuple[str, ...]] = ("grad_norm",)
    hold: ClassVar[int] = 10
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR
    ratio: float = 10.0
    z: float = 6.0
    min_history: int = 20
    least: float = 0.1

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the newest norm dwarfs the recent maximum and the usual level."""
        norm = window.scalar("grad_norm")
        history = window.history("grad_norm")
        if norm is None or not math.isfinite(norm) or len(history) < self.min_history:
            return
        highest = history.recent_max
        if norm <= self.ratio * max(highest, 1e-30):  # cheap test first: the robust one sorts the history
            return
        z = history.log_z(norm)
        if z < self.z or not self._matters(window, norm):
            return
        if not is_fixed_objective(window) and not one_step_did_harm(window):
            return
        before = window.earlier("grad_norm")
        names, growth = self._most_grown(window)
        most = f", most in {names[0]} ({growth:.3g}x its usual norm)" if names else ""
        coef = window.scalar("clip_coef")
        clipped = f" It was clipped to {norm * coef:.3g}." if coef is not None and coef < 1.0 else ""
        yield Finding(
            code=self.code,
            name=self.name,
            step=window.now.step,
            severity=self.severity,
            message=f"the gradient norm is {norm:.4g} ({before.range()}){most}.{clipped}",
            subject=names,
            evidence={"grad_norm": norm, "usual": before.usual, "highest": before.highest, "z": z, "growth": growth},
        )

    def _matters(self, window: Window, norm: float) -> bool:
        """Whether such a gradient is large for a run that has learned: one that has converged has tiny ones."""
        if norm > self.least * window.history("grad_norm").initial:
            return True
        loss, level = window.scalar("loss"), window.level("loss")
        if loss is None or not level.start > level.best:
            return False
        return loss > level.best + LOST * (level.start - level.best)

    def _most_grown(self, window: Window) -> tuple[tuple[str, ...], float]:
        names = window.now.names(Kind.GRAD)
        growth = window.gradients.growth(names, window.now.col(Kind.GRAD, Column.L2))
        if not growth.size:
            return (), math.nan
        top = np.argsort(-growth, kind="stable")[:NUM_NAMED]
        return tuple(names[i] for i in top), float(growth[top[0]])
