"""LOSS003: the loss climbs away from the best level it had and stays there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.harm import gradients_left, is_fixed_objective, weights_thrown
from trimtab.core.schedule import SPAN, rates_of
from trimtab.core.screen import Bounds
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found

LATE, EARLY = 16, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DivergingLoss:
    """The loss climbs away from its best level, or never came below its first one.

    ## What it sees
    A one-sided CUSUM adds up how far the loss lies above the best level it ever had, in units of its own noise;
    beyond chance, and when at least `part` of what was learned is lost for `lasting` steps without coming back, or
    much more than that at once, the run diverges. A jump to new data that is being learned comes back. While the rate
    grows (to `grown` times the highest that was used until 64 steps ago, not in one jump) less is enough: `driven` of
    what was learned, if `surely` of all pairs of a loss of the last 16 steps and one of before agree. Or the loss
    leaves its very first level upwards in the first steps and does not come back. The sign of the gradient at the
    output, where it can be read, and a cross-entropy that falls without end say that the loss is climbed instead of
    descended. Only a loss that measures answers against given targets should fall. In reinforcement learning, in games
    of two models and where a model sets its own targets a loss may rise for good reasons: there it counts only if
    gradients rise far out of their range with it and stay there, or steps replace the weights. The step where the
    climb began is in the evidence.

    ## Why it matters
    A run that climbs rarely comes back by itself, and what it had learned is lost.

    ## What to try
    1. Log the terms of the loss one by one: which of them climbs?
    """

    code: ClassVar[str] = "LOSS003"
    name: ClassVar[str] = "diverging-loss"
    needs: ClassVar[tuple[str, ...]] = ("loss",)
    hold: ClassVar[int] = 30
    calm: ClassVar[bool] = True
    wakes: ClassVar[Mapping[str, Bounds | None]] = {
        "bounded": {"loss": (0.0, math.inf)},
        "loss_factor": {"loss_factor": (0.0, math.inf)},
    }
    severity: Severity = Severity.ERROR
    part: float = 0.85
    lasting: int = 20
    early: int = 6
    below: float = 3.0
    grown: float = 3.0
    driven: float = 0.08
    surely: float = 0.9

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on a climb beyond chance, or on a start that only leads upwards."""
        loss, level = window.scalar("loss"), window.level("loss")
        if loss is None or not math.isfinite(loss):
            return
        factor = window.scalar("loss_factor")
        if factor is not None and factor < 0:
            yield found(
                self,
                window,
                "the update climbs the loss instead of descending it: the gradient at the output has the wrong sign.",
                ("loss",),
                loss=loss,
                factor=factor,
            )
            return
        if len(level) < self.early:
            return
        chance = _chance(window)
        if (
            window.scalar("bounded")
            and chance
            and level.start - max(loss, level.now) > self.below * chance
            and loss < 0
        ):
            yield found(
                self,
                window,
                f"the loss has fallen from about {level.start:.4g} to {loss:.4g}; a cross-entropy cannot fall so far: "
                "its sign is wrong, or that of something added to it.",
                ("loss",),
                loss=loss,
            )
            return
        drift = window.drift
        climbs = drift.alarmed and self._lost(window, loss)
        if (climbs and (is_fixed_objective(window) or gradients_left(window))) or self._driven_up(window):
            onset = drift.onset if drift.total > 0 else window.now.step - LATE
            yield self._finding(window, loss, level.best, onset)
        elif not drift.alarmed and len(level) < 3 * self.early:
            yield from self._from_the_start(window, loss)

    def _lost(self, window: Window, loss: float) -> bool:
        """Whether what was learned is lost: for long, without coming back, or so far that no training was better."""
        level = window.level("loss")
        chance = _chance(window)
        start = level.start if chance is None else min(level.start, max(chance, level.best))
        gained = max(start - level.best, 0.0)
        # A run that had not gained much yet has not much to lose: there the loss itself is the measure.
        much = self.part * gained if gained > 0.1 * abs(level.best) else 0.5 * abs(level.best)
        spread = max(much, 3.0 * level.calm_noise)
        if min(level.now, loss) > level.best + gained + 1.5 * spread:
            return True
        last = window.last("loss", self.lasting)
        if len(last) < self.lasting or sum(v > level.best + spread for v in last) < 0.8 * self.lasting:
            return False
        half = self.lasting // 2
        return sorted(last[half:])[half // 2] > sorted(last[:half])[half // 2] - 0.07 * max(gained, spread)

    def _driven_up(self, window: Window) -> bool:
        """Whether the rate grows beyond all the run was used to, and the loss with it: the rest need not be seen."""
        schedule, now = window.schedule, window.now
        rate = max(rates_of(now.scalars), default=0.0) * now.scalars.get("lr_multiplier", 1.0)  # what is in force
        if not rate > self.grown * schedule.used_to > 0 or now.layout.optimizer:
            return False
        if now.step - max(schedule.raised_at, schedule.grown_at, schedule.resized_at) <= SPAN:
            return False  # it did not grow: somebody set it
        losses = window.last("loss", SPAN)
        if len(losses) < SPAN:
            return False
        late, early = losses[-LATE:], losses[:EARLY]
        was = sorted(early)[EARLY // 2]
        much = self.driven * max(window.level("loss").start - was, 0.25 * abs(was))
        higher = sum(a > b for a in late for b in early) / (LATE * EARLY)
        return higher >= self.surely and sorted(late)[LATE // 2] > was + much

    def _from_the_start(self, window: Window, loss: float) -> Iterator[Finding]:
        level = window.level("loss")
        last = window.last("loss", self.early)
        if len(last) < self.early or not min(last) > 2.0 * abs(level.start_max) + 1e-3:
            return
        if not (is_fixed_objective(window) or weights_thrown(window)):
            return
        yield self._finding(window, loss, level.start, window.earlier("loss").first_step)

    def _finding(self, window: Window, loss: float, reference: float, onset: int) -> Finding:
        norm, usual = window.scalar("grad_norm"), window.level("grad_norm")
        return found(
            self,
            window,
            f"the loss has climbed to {loss:.4g} from about {reference:.4g}, beginning about step {onset}.",
            ("loss",),
            loss=loss,
            best=reference,
            onset=float(onset),
            grad_norm=norm,
            usual_grad_norm=usual.now,
        )


def _chance(window: Window) -> float | None:
    """What guessing gives, as it was told last: it is told every few steps."""
    return next(iter(window.last("chance", 8)[-1:]), None)
