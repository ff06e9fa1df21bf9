"""GRAD010: one loss was taken back twice before a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubleBackward:
    """One loss was taken back twice before a step.

    ## What it sees
    Two backward passes right after each other, within one step, gave the same gradient bit for bit, in `looks` of the
    steps that are listened to. Micro-batches of different data never do.

    ## Why it matters
    The gradient is twice what the loss says. Adam hides it; clipping, weight decay and every other optimizer are off by
    that factor, and the second pass costs as much as the first.

    ## What to try
    1. Look for a second `backward()` on the same loss, often with `retain_graph=True`: in the loop and in a helper.
    2. If the passes are micro-batches, check that each of them draws a new batch.
    """

    code: ClassVar[str] = "GRAD010"
    name: ClassVar[str] = "double-backward"
    needs: ClassVar[tuple[str, ...]] = ("doubled",)
    hold: ClassVar[int] = 40
    severity: Severity = Severity.WARN
    looks: int = 3

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when it happened in several steps."""
        num = window.scalar("doubled")
        if not num or len(window.last("doubled", 64)) < self.looks:
            return
        yield found(
            self,
            window,
            f"of {(window.scalar('backwards') or num + 1.0):.0f} backward passes in this step, {num:.0f} gave the same "
            "gradient as the one before, bit for bit.",
            ("backward",),
            doubled=num,
            backwards=window.scalar("backwards"),
        )
