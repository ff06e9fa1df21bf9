"""ACT003: the model gives the same answer to every input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class CollapsedOutput:
    """The model gives the same answer to every input.

    ## What it sees
    The output of the model hardly varies between the samples of a batch (`spread` of its mean square) in `persist`
    looks in a row, five forwards apart, although it did before or the run is `grace` steps old, and the inputs do
    vary.

    ## Why it matters
    It no longer looks at its inputs: dead layers, a bias that has swallowed everything, or a collapse of the
    representation.

    ## What to try
    1. Go back to a checkpoint from before the collapse.
    2. Check the normalisation of inputs, and of the last layer.
    """

    code: ClassVar[str] = "ACT003"
    name: ClassVar[str] = "collapsed-output"
    needs: ClassVar[tuple[str, ...]] = ("out_spread",)
    hold: ClassVar[int] = 60
    calm: ClassVar[bool] = True
    severity: Severity = Severity.WARN
    spread: float = 1e-5
    persist: int = 2
    grace: int = 25

    def silent_between(self) -> dict[str, tuple[float, float]]:
        """Answers that differ by more are no collapse."""
        return {"out_spread": (self.spread, math.inf)}

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when outputs are constant for long."""
        spread = window.scalar("out_spread")
        if spread is None or spread > self.spread or window.scalar("in_flat"):
            return
        looks = window.last("out_spread", 40)
        late = looks[-self.persist :]
        if len(late) < self.persist or max(late) > self.spread:
            return
        loss = window.level("loss")
        learns = loss.now < loss.start - 0.1 * abs(loss.start)
        if max(looks) < 100.0 * self.spread and (learns or window.now.step < self.grace):
            return  # never more than this: it begins so (a head of zeros), or it lies in the nature of the model
        yield found(
            self,
            window,
            f"the output differs between the samples of a batch by only {spread:.2g} of its size.",
            ("output",),
            spread=spread,
        )
