"""LOSS011: the model ends in an activation that its loss has no use for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found

CUTTING = {"relu": "ReLU", "tanh": "tanh"}
"""Activations that a loss of logits must not follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrongOutputActivation:
    """The model ends in an activation that its loss has no use for.

    ## What it sees
    In `looks` looks: the answers of a batch add up to 1 over the samples instead of over the choices (a softmax over
    dimension 0); or logits of a cross-entropy are never negative, and many are exactly 0 (a ReLU behind the last
    layer); or the graph of the loss shows a ReLU or a tanh right in front of it.

    ## Why it matters
    A softmax over the batch makes samples compete with each other: what the model says about one depends on the others
    in its batch. A ReLU cuts off all that speaks against an answer, and its gradient with it. Both learn a little, so
    nothing looks broken.

    ## What to try
    1. Normalise over the choices: `softmax(dim=-1)`, or leave it to `cross_entropy`.
    2. Let the model end in its linear layer: losses that take logits expect values of both signs.
    """

    code: ClassVar[str] = "LOSS011"
    name: ClassVar[str] = "wrong-output-activation"
    needs: ClassVar[tuple[str, ...]] = ("batch_softmax", "rectified_logits", *(f"logits_{name}" for name in CUTTING))
    hold: ClassVar[int] = 100
    severity: Severity = Severity.ERROR
    looks: int = 3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when one of them was seen several times."""
        if window.scalar("batch_softmax") and len(window.last("batch_softmax", 64)) >= self.looks:
            yield found(
                self,
                window,
                "the answers add up to 1 over the samples of a batch, not over the choices (softmax over dimension 0).",
                ("output",),
            )
        cut = [word for name, word in CUTTING.items() if len(window.last(f"logits_{name}", 64)) >= self.looks]
        if cut and any(window.scalar(f"logits_{name}") for name in CUTTING):
            yield found(
                self,
                window,
                f"a {cut[0]} stands between the last layer and the loss, which takes logits of any size and sign.",
                ("output",),
            )
        share = None if cut else window.scalar("rectified_logits")
        if share and len(window.last("rectified_logits", 64)) >= self.looks:
            yield found(
                self,
                window,
                f"no logit is negative and {share:.0%} of them are exactly 0: the model ends in a ReLU, and the loss "
                "expects values of both signs.",
                ("output",),
                zeros=share,
            )
