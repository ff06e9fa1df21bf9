"""DATA007: the model learns, and yet does no better than guessing: targets do not follow from inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import ClassVar

from trimtab.core.screen import Bounds
from trimtab.core.stats.series import is_falling
from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetsDoNotPredict:
    """The model learns, and yet does no better than guessing: targets do not follow from inputs.

    ## What it sees
    The weights keep moving, the loss has settled at what guessing by frequency gives (within `gain`), and successive
    gradients point nowhere: after as much effort as `effort` steps there is nothing in the inputs that predicts the
    targets. A model that is given tokens stands at that level for long before it finds out more: it gets `tokens`
    times as many steps. A mean loss that lies `surely` standard errors below chance is a run that is merely slow.
    Chance is known for cross-entropy and squared error with targets told through `batch`.

    ## Why it matters
    Shuffled or shifted labels, a wrong join, inputs of another sample: the run looks healthy and learns only how
    often each answer occurs.

    ## What to try
    1. Look for a shuffle, a sort or a filter that was applied to only one of inputs and targets; in language models
       for targets shifted by one too many.
    2. Fit a linear model to a few hundred samples: if it is at chance too, the data are the problem.
    """

    code: ClassVar[str] = "DATA007"
    name: ClassVar[str] = "targets-do-not-predict"
    needs: ClassVar[tuple[str, ...]] = ("chance",)
    hold: ClassVar[int] = 50
    every: ClassVar[int] = 5
    severity: Severity = Severity.WARN
    effort: float = 90.0
    tokens: float = 4.0
    gain: float = 0.015
    settled: float = 0.01
    moving: float = 3e-4
    same: float = 0.1
    surely: float = 3.0

    def silent_while(self, window: Window) -> Bounds:
        """Of a run that was clearly better than guessing once it is not said: that level never rises."""
        level = window.level("loss")
        return {
            "chance": (
                max(level.sure, 0.0) / (1.0 - 6.0 * self.gain) * (1.0 + 1e-9),
                math.inf,
            )
        }

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when effort and movement lead nowhere but to chance."""
        chance, level = window.scalar("chance"), window.level("loss")
        if chance is None or chance <= 0 or window.now.layout.optimizer:
            return
        effort = self.effort if window.scalar("in_rms") is not None else self.tokens * self.effort
        if window.schedule.effort < effort or not level.now > chance * (1.0 - self.gain):
            return
        if level.sure < chance * (1.0 - 6.0 * self.gain) or level.now > chance * (1.0 + 10.0 * self.gain):
            return  # it was better once; or something else is in the loss
        losses = window.history("loss").values()
        late, before = losses[-32:], losses[-96:-48]
        if len(before) < 32 or sorted(before)[len(before) // 2] - sorted(late)[16] > self.settled * chance:
            return  # it still falls: on its way through the level of guessing
        if fmean(losses[-64:]) < chance - self.surely * stdev(losses[-64:]) / 8.0:
            return  # clearly better than guessing, if only by little: it is slow
        if is_falling(losses, at_least=0.2 * self.settled * chance):
            return
        ratios, turns = window.last("update_ratio", 48), window.last("grad_cos", 48)
        if len(ratios) < 24 or sorted(ratios)[len(ratios) // 2] < self.moving:
            return
        turn = sum(turns) / len(turns) if turns else 0.0
        if turn > self.same:
            return  # gradients agree: it is still on its way
        yield found(
            self,
            window,
            f"the loss has settled at about {level.now:.4g}, and guessing by frequency gives {chance:.4g}: the weights "
            "move, but nothing in the inputs predicts the targets.",
            ("targets",),
            loss=level.now,
            chance=chance,
            gradient_cosine=turn,
        )
