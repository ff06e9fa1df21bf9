"""OPT003: the optimizer holds parameters the model no longer has, and misses those it has now."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class StaleOptimizer:
    """The optimizer holds parameters the model no longer has, and misses those it has now.

    ## What it sees
    The optimizer has parameters that are not in the model and get no gradient, while parameters of the model that do
    get one are held by no optimizer: the optimizer was built before a module was replaced, re-initialised or moved.

    ## Why it matters
    The new module never learns. The old one is kept alive for nothing.

    ## What to try
    1. Build the optimizer after the model is complete and on its device.
    2. After replacing a head, build the optimizer again, or add the new parameters as a group.
    """

    code: ClassVar[str] = "OPT003"
    name: ClassVar[str] = "stale-optimizer"
    needs: ClassVar[tuple[str, ...]] = ("idle",)
    hold: ClassVar[int] = 60
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when old parameters are held and new ones are not."""
        idle, num = window.scalar("idle"), window.scalar("unheld")
        if not idle or not num:
            return
        names = window.now.notes.get("unheld", ())
        yield found(
            self,
            window,
            f"the optimizer holds {int(idle)} parameters that are no longer in the model, and {int(num)} that are in "
            f"it get gradients nobody uses: {listed(names, num)}.",
            names,
            num_old=idle,
            num_new=num,
        )
