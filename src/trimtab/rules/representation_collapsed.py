"""ACT004: a layer inside the model gets the same input for every sample."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class RepresentationCollapsed:
    """A layer inside the model gets the same input for every sample.

    ## What it sees
    The gradient of a layer's weights has one direction, and what that says about the layer's input stays the same, in
    `looks` looks in a row, 20 steps apart: what comes in does not depend on the sample. It counts where the input did
    depend on it before, or where half of the layers are like that. If all of them are, the data are (constant-batch).
    A layer in front of a single number cannot be judged, and neither can one without a bias.

    ## Why it matters
    What lies before that layer carries no information any more: embeddings became one point, every unit of a layer is
    dead or saturated, or a part was multiplied by 0. The loss can still fall, through biases alone.

    ## What to try
    1. Look at the layer before the named one: dead or saturated units, a factor of 0, a mean over the wrong dimension.
    2. Lower the learning rate or the weight of a regulariser that pulls outputs together; go back to a checkpoint from
       before the collapse.
    """

    code: ClassVar[str] = "ACT004"
    name: ClassVar[str] = "representation-collapsed"
    needs: ClassVar[tuple[str, ...]] = ("same_input",)
    hold: ClassVar[int] = 60
    severity: Severity = Severity.WARN
    looks: int = 4
    varied: int = 3
    share: float = 0.5

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when it lasts."""
        streak, share = window.scalar("same_input") or 0.0, window.scalar("same_input_share") or 0.0
        if streak < self.looks or not share < 1.0:
            return
        if (window.scalar("same_input_varied") or 0.0) < self.varied and share < self.share:
            return  # a branch that is given a constant, by the nature of the model
        names = window.now.notes.get("same_input", ())
        yield found(
            self,
            window,
            f"the input of {listed(names) or 'a layer'} has been the same for every sample in the last {streak:.0f} "
            "looks: what comes before it carries nothing.",
            names,
            looks=streak,
            share_of_layers=share,
        )
