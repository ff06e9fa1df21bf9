"""GRAD004: gradients are exactly zero, step after step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.core.stats.row_history import is_trunk, routed
from trimtab.core.types import Column, Finding, Kind, Severity
from trimtab.core.window import Window, found, listed

JUDGED = 16
"""Steps at a loss of 0 after which it is known whether the run was heading there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ZeroGradient:
    """Gradients are exactly zero, step after step.

    ## What it sees
    All gradients together are exactly 0 for `persist` steps while the loss is not; or the gradients of a good part of
    the weights (`share`) have been exactly 0 since the start or for `long` steps, while others are not. A loss of 0
    (a hinge loss that is satisfied, advantages that are all 0) and parameters whose gradient comes and goes (routed
    experts, alternating heads) stay silent, and so does the first step of a layer that is initialised to zero.

    ## Why it matters
    A weight with a zero gradient does not learn. Dead ReLU units, a mask that hides everything or a factor of 0 in
    the loss are the usual reasons, and the loss curve looks like an ordinary plateau.

    ## What to try
    1. Look for ReLU layers whose outputs are all 0: a large negative bias or a too large step killed them.
       Re-initialise them.
    2. Check masks and loss weights: are they all 0?
    3. Check for integer or rounding operations, argmax or comparisons between the parameters and the loss: their
       gradient is 0.
    """

    code: ClassVar[str] = "GRAD004"
    name: ClassVar[str] = "zero-gradient"
    needs: ClassVar[tuple[str, ...]] = ("grad_norm",)
    hold: ClassVar[int] = 50
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR
    persist: int = 4
    long: int = 20
    share: float = 0.02

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire on zeros that last: everywhere, or in a good part of the weights."""
        norm, loss = window.scalar("grad_norm"), window.scalar("loss")
        if norm is None or (loss == 0 and self._arrived(window)):
            return
        if norm == 0:
            past = list(window.past)[-self.persist :]
            measured = (window.now.col(Kind.GRAD, Column.L2) >= 0).any()
            if measured and len(past) == self.persist and not any(s.get("grad_norm") for s in past):
                yield found(
                    self,
                    window,
                    f"every gradient has been exactly 0 for {self.persist} steps; the loss is {loss}.",
                    ("loss",),
                    loss=loss,
                )
            return
        runs = window.runs
        if runs.calm or runs.names != window.now.names(Kind.GRAD):
            return
        # Since its first step, or for long after having had gradients; a row that came back before comes back again.
        stuck = (runs.zero >= self.persist) & ((runs.real == 0) | (runs.zero >= self.long)) & (runs.gaps < 2)
        sizes = np.array(window.now.layout.numel[window.now.layout.rows(Kind.GRAD)], np.float64)
        never = stuck.any() and not (runs.real > 0)[stuck].any()
        if never and not is_trunk(runs.names, stuck, (runs.zero == 0) & (sizes > 1)):
            stuck &= ~routed(runs.names, sizes, runs.real > 0)
        if not stuck.any() or sizes[stuck].sum() < self.share * sizes.sum():
            return
        names = tuple(n for n, bad in zip(runs.names, stuck, strict=True) if bad)
        yield found(
            self,
            window,
            f"{len(names)} of {len(runs.names)} parameters get gradients of exactly 0: {listed(names)}.",
            names[:8],
            num_parameters=len(names),
            steps=float(runs.zero[stuck].max()),
        )

    @staticmethod
    def _arrived(window: Window) -> bool:
        """Whether a loss of 0 is where the run was heading (a hinge that is satisfied), not where it was thrown."""
        losses = [v for s in window.past if (v := s.get("loss")) is not None]
        before = [v for v in losses if v != 0]
        if before and min(before) < 0 < max(before):
            return True  # weights of either sign, such as advantages: they are 0 where all rewards are the same
        if not before:  # it has been 0 for as long as is remembered: it was judged when it came there
            return bool(window.runs.real.any())
        last = max(i for i, v in enumerate(losses) if v != 0)
        if len(losses) - last > JUDGED:  # the same where most of the way there is forgotten
            return bool(window.runs.real.any())
        came_and_went = 0.0 in losses[:last]  # more and more batches are satisfied
        steep = before[-1] < 0.3 * max(before[-3:-1], default=0.0)  # the next step would be below 0
        near = 0.25 if came_and_went or steep or len(before) < 3 else 0.03  # of few the way there is forgotten
        return min(map(abs, before[-3:])) < near * abs(window.level("loss").start)
