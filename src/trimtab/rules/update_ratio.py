"""UPD001: steps are far too large, or far too small, for the weights they change."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.schedule import rates_of
from trimtab.core.types import Finding, Kind, Severity
from trimtab.core.window import MIN_CALM, Window, found

REPLACED = 2.0
"""Times their size: a step this large leaves nothing of the weights."""
DEAD = 0.02
"""Share of the first gradient norm below which hardly any gradient comes through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRatio:
    """Steps are far too large, or far too small, for the weights they change.

    ## What it sees
    Too large: over the last `span` steps the median update is above `large` of the size of the weights while the loss,
    `patience` steps in, is no better than at the start; or one of the first `span` steps changed them by more than
    `shake` of their size and the loss is worse for it, or hardly any gradient is left. Too small: from the start on, at
    a rate that is not being warmed up, the median update is below `small` and the loss has not moved.

    ## Why it matters
    A healthy step changes weights by about a thousandth of their size. A hundred times more and the network is shaken
    rather than trained; a thousand times less and a run needs years.

    ## What to try
    1. See "Update ratio" in `trimtab report --html`: was it so from the start, or since a change of the learning
       rate?
    """

    code: ClassVar[str] = "UPD001"
    name: ClassVar[str] = "update-ratio"
    needs: ClassVar[tuple[str, ...]] = ("update_ratio",)
    calm: ClassVar[bool] = True
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR
    large: float = 0.25
    small: float = 3e-6
    shake: float = 0.4
    span: int = 10
    patience: int = 20

    def silent_between(self) -> dict[str, tuple[float, float]]:
        """Within these an update is neither large nor small. Of the first `span` steps none is passed over."""
        return {"update_ratio": (self.small, self.large) if self.span < MIN_CALM else (math.inf, math.inf)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on updates out of all proportion that do not help."""
        ratio = window.scalar("update_ratio")
        if ratio is None or window.scalar("rejected"):
            return
        if 2 <= len(window.past) <= self.span:
            yield from self._thrown(window)
        if self.small < ratio < self.large:
            return
        ratios, loss = window.last("update_ratio", self.span), window.level("loss")
        if len(ratios) < self.span or len(loss) < self.patience:  # a fast start may need a few steps to take hold
            return
        median = sorted(ratios)[self.span // 2]
        worse = loss.now > loss.start - max(0.5 * loss.noise, 0.02 * abs(loss.start))
        rates = rates_of(window.now.scalars)
        rate = f" The learning rate is {max(rates):.3g}." if rates else ""
        if median > self.large and worse:
            story = f"a step usually changes the weights by {median:.3g} times their size, and the loss is no better."
        elif 0 < median < self.small and self._never_moved(window):
            story = f"a step changes the weights by only {median:.3g} times their size, and the loss stands still."
        else:
            return
        yield found(
            self, window, story + rate, update_ratio=median, lr=max(rates, default=None), harm=median / self.large
        )

    def _thrown(self, window: Window) -> Iterator[Finding]:
        """The very first steps replaced the weights rather than changed them, and the network is the worse for it.

        Either the loss is, or hardly any gradient comes through any more though there is much left to learn.
        """
        size = math.sqrt(sum(window.now.layout.numel[window.now.layout.rows(Kind.GRAD)]) or 1)
        most = max(window.last("update_ratio", len(window.past) + 1), default=0.0)
        losses = [v for s in (*window.past, window.now.scalars) if (v := s.get("loss")) is not None]
        # Weights that are next to nothing at first are multiplied by any step. After going back to them it is known.
        if most < self.shake or window.past[0].get("weight_norm", math.inf) < 1e-3 * size or len(losses) < 3:
            return
        norms = window.last("grad_norm", len(window.past) + 1)
        # Batches of a small model differ by more than a little: the less was changed, the clearer it must be.
        clearly = 0.15 + 0.85 * max(0.0, 1.0 - most) / (1.0 - self.shake)
        worse = min(losses[-2:]) > losses[0] + clearly * abs(losses[0])
        if most < REPLACED:  # the weights are still there: of a few small batches three must agree, beside two
            first = max(losses[:2])
            worse = worse and len(losses) > 5 and min(losses[-3:]) > first + clearly * abs(first)
        dead = most > 1.0 and len(norms) > 3 and max(norms[-2:]) < DEAD * norms[0] and losses[-1] > 0.5 * losses[0] > 0
        if not worse and not dead:
            return
        rates = rates_of(window.now.scalars)
        came = (
            f"the loss went from {losses[0]:.4g} to {losses[-1]:.4g}"
            if worse
            else f"the gradient norm fell from {norms[0]:.3g} to {norms[-1]:.3g} at a loss of {losses[-1]:.4g}"
        )
        yield found(
            self,
            window,
            f"the first steps changed the weights by up to {most:.4g} times their size, and {came}: the learning rate"
            f"{f' ({max(rates):.3g})' if rates else ''} is far too high.",
            update_ratio=most,
            lr=max(rates, default=None),
            harm=most / self.shake,
            onset=float(window.now.step - len(window.past)),
        )

    def _never_moved(self, window: Window) -> bool:
        """Whether it was so from the start, the rate is not being raised, and the loss is where it began."""
        schedule, loss = window.schedule, window.level("loss")
        if window.history("update_ratio").highest > 10.0 * self.small or window.now.step < self.patience:
            return False
        rising = max(rates_of(window.now.scalars), default=0.0) > 1.001 * max(rates_of(window.past[-1]), default=0.0)
        gained = loss.start - loss.now > max(2.0 * loss.noise, 0.02 * abs(loss.start))
        return not rising and schedule.idle_steps == 0 and not gained
