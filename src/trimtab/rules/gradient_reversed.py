"""GRAD009: the optimizer gets the opposite of the gradient that backward computed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientReversed:
    """The optimizer gets the opposite of the gradient that backward computed.

    ## What it sees
    A weight that is listened to: between the backward pass and the step its gradient was multiplied by a negative
    number, in `looks` looks. It counts where it was not so before, or where the loss measures answers against given
    targets, so that nobody can want it to rise.

    ## Why it matters
    Every step then goes uphill. In a game of two models, or with a loss that has no level, nothing else shows it.

    ## What to try
    1. Look for what writes to `.grad` between `backward()` and the step: a sign, a negative factor, a scale.
    2. To climb on purpose, use `maximize=True` of the optimizer or change the sign of the loss.
    """

    code: ClassVar[str] = "GRAD009"
    name: ClassVar[str] = "gradient-reversed"
    needs: ClassVar[tuple[str, ...]] = ("handed",)
    hold: ClassVar[int] = 40
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR
    looks: int = 2

    def silent_between(self) -> dict[str, tuple[float, float]]:
        """A gradient that is only clipped or scaled keeps its sign."""
        return {"handed": (0.0, math.inf)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the sign is wrong several times."""
        handed = window.scalar("handed")
        if handed is None or not handed < 0:
            return
        known = window.last("handed", 64)
        late = known[-self.looks :]
        if len(late) < self.looks or max(late) >= 0:
            return
        fixed = bool(window.last("fixed", 64) or window.last("bounded", 64))
        if not fixed and max(known) < 0:
            return  # from the start, and nobody knows in which direction this loss should go
        yield found(
            self,
            window,
            f"the optimizer gets {handed:.3g} times the gradient that backward computed: steps go uphill.",
            ("gradients",),
            factor=handed,
        )
