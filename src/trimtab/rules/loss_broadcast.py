"""WIRE019: every answer is compared with every target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBroadcast:
    """Every answer is compared with every target of the batch.

    ## What it sees
    The gradient of a squared error draws all answers of a batch to one value, which changes from batch to batch, and
    the loss is larger than the distances to that value, in `looks` looks.

    ## Why it matters
    Answers of shape [n, 1] and targets of shape [n] are broadcast to [n, n]. The model can only learn the mean of all
    targets. The loss falls to their variance and stays there, without any error.

    ## What to try
    1. Give both the same shape: `loss_fn(output.squeeze(-1), target)` or `target.unsqueeze(-1)`.
    """

    code: ClassVar[str] = "WIRE019"
    name: ClassVar[str] = "loss-broadcast"
    needs: ClassVar[tuple[str, ...]] = ("one_target",)
    hold: ClassVar[int] = 100
    severity: Severity = Severity.ERROR
    looks: int = 3
    differ: float = 1e-3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when it was seen several times, with another value each time."""
        known = window.last("one_target", 64)[-self.looks :]
        if window.scalar("one_target") is None or len(known) < self.looks:
            return
        if max(known) - min(known) <= self.differ * max(abs(v) for v in known):
            return  # one half of an adversarial loss
        yield found(
            self,
            window,
            f"all answers of a batch are drawn to one value (here {known[-1]:.3g}): each answer is compared with each "
            "target, which happens where [n, 1] meets [n].",
            ("loss",),
            target=known[-1],
        )
