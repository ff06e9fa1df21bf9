"""LOSS003: the loss climbs away from the best level it had and stays there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.found import found
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergingLoss:
    """The loss climbs away from its best level, or never came below its first one.

    ## What it sees
    A one-sided CUSUM adds up how far the loss lies above the best level it ever had, in units of its own noise; beyond
    chance, and when at least `part` of what was learned is lost again, the run diverges. Or the loss leaves its very
    first level upwards in the first steps and does not come back. A cross-entropy far below 0 has the wrong sign. Where two optimizers work against each other a loss
    may rise for good reasons: there only a tenfold rise counts. The step where the climb began is in the evidence.

    ## Why it matters
    A run that climbs rarely comes back by itself, and what it had learned is lost.

    ## What to try
    1. Lower the learning rate (a third to a tenth), or lengthen the warm-up.
    2. Clip the gradient norm: `Guard(..., clip=1.0)`.
    3. Check the sign of the loss and of every term in it, and the sign of weight decay.
    4. Go back to a checkpoint from before the onset.
    """

    code: ClassVar[str] = "LOSS003"
    name: ClassVar[str] = "diverging-loss"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    hold: ClassVar[int] = 30
    severity: Severity = Severity.ERROR
    part: float = 0.8
    early: int = 6
    below: float = 0.5

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on a climb beyond chance, or on a start that only leads upwards."""
        loss, level = window.scalar("loss"), window.level("loss")
        if loss is None or not math.isfinite(loss) or len(level) < self.early:
            return
        if window.scalar("bounded") and max(loss, level.now) < -self.below:
            yield found(
                self,
                window,
                f"the loss is {loss:.4g}, and a cross-entropy cannot be negative: its sign is wrong, or it is fed with "
                "something else than log-probabilities.",
                ("loss",),
                loss=loss,
            )
            return
        if window.drift.alarmed:
            spread = max(self.part * (level.start - level.best), 0.5 * abs(level.best), 6.0 * level.noise)
            if window.now.layout.optimizer:
                spread = max(10.0 * spread, 10.0 * abs(level.start))
            if min(level.now, loss) > level.best + spread:
                yield self._finding(window, loss, level.best, window.drift.onset)
            return
        if len(level) < 3 * self.early:
            yield from self._from_the_start(window, loss)

    def _from_the_start(self, window: Window, loss: float) -> Iterator[Finding]:
        level = window.level("loss")
        last = window.last("loss", self.early)
        times = 10.0 if window.now.layout.optimizer else 2.0
        if len(last) < self.early or not min(last) > times * abs(level.start) + 1e-3:
            return
        yield self._finding(window, loss, level.start, 0)

    def _finding(self, window: Window, loss: float, reference: float, onset: int) -> Finding:
        norm, usual = window.scalar("grad_norm"), window.level("grad_norm")
        return found(
            self,
            window,
            f"the loss has climbed to {loss:.4g} from {reference:.4g}, beginning about step {onset}.",
            ("loss",),
            loss=loss,
            best=reference,
            onset=float(onset),
            grad_norm=norm,
            usual_grad_norm=usual.now,
        )
