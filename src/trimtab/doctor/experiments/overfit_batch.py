"""Where the loss of one single batch goes under the training's own optimizer, at its own rate or another."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Call

NOISE = 1e-6
"""Below this part of itself a change of a float32 loss is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """Losses of one batch, step by step.

    `ratio` is how far a step moves the weights, as a part of their size, and `leap` the largest of the first few.
    """

    losses: tuple[float, ...]
    num_steps: int
    ratio: float
    leap: float
    norm: float

    @property
    def first(self) -> float:
        """The loss before the first step."""
        return self.losses[0]

    @property
    def last(self) -> float:
        """The loss at the end; where it ended in NaN, that."""
        return self.losses[-1]

    @property
    def num(self) -> int:
        """How many calls there were."""
        return len(self.losses)

    @property
    def fell(self) -> bool:
        """Whether it came down, and is down at the end."""
        late = [v for v in self.losses[len(self.losses) // 2 :] if math.isfinite(v)]
        if not late or not math.isfinite(self.last):
            return False
        slack = NOISE * max(abs(self.first), 1e-12)
        return sorted(late)[len(late) // 2] < self.first - slack

    @property
    def peak(self) -> float:
        """The highest loss, in units of the first; infinite where it went beyond all numbers."""
        top = max(v if math.isfinite(v) else math.inf for v in self.losses)
        return top / abs(self.first) if self.first else math.inf


def course(probe: Probe, factor: float = 1.0) -> Course | None:
    """The course at the training's own rate times a factor; None where the step returns no loss."""
    if factor == 1.0:
        return _of(probe.fixed)
    found: Course | None = probe.cached(("course", factor), lambda: _at(probe, factor))
    return found


def _at(probe: Probe, factor: float) -> Course | None:
    num = probe.affordable(20, least=6, seconds=1.5)
    with probe.trial():
        probe.scale_rates(factor)
        return _of(probe.run([probe.batch(0)] * num, listen=True, seeds=[probe.options.seed] * num))


def _of(calls: list[Call]) -> Course | None:
    losses = [c.loss for c in calls if c.failure is None and c.loss is not None]
    if len(losses) < 3:
        return None
    steps = [e for c in calls for e in c.of("step")]
    leaps = [e.facts["leap"] for e in steps]
    norms = [math.sqrt(sum(v * v for v in e.facts["gradients"].present.values())) for e in steps]
    return Course(
        losses=tuple(losses),
        num_steps=len(steps),
        ratio=sorted(leaps)[len(leaps) // 2] if leaps else 0.0,
        leap=max((v for v in leaps[:5] if math.isfinite(v)), default=0.0),
        norm=norms[0] if norms else 0.0,
    )
