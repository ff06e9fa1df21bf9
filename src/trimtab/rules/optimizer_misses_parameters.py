"""OPT002: parameters get gradients that no optimizer uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerMissesParameters:
    """Parameters get gradients that no optimizer uses.

    ## What it sees
    Parameters of the model require a gradient and have one, no optimizer of this guard holds them, and nothing else
    moves them either. Seen at step 2 and every 10 steps. Or the optimizer that holds them, one of several, has not made
    a single step in the 60 that another one has made.

    ## Why it matters
    They stay as initialised while the rest learns around them. Common after adding a layer, with hand-made parameter
    groups, or when only part of the model was passed.

    ## What to try
    1. Pass all of them: `optimizer = AdamW(model.parameters(), ...)`, or add the missing ones as a group.
    2. If they are meant to be frozen, say so with `requires_grad_(False)`: that also saves the time of their
       gradients.
    3. Call `step()` of every optimizer, also of one that was added later.
    4. If another optimizer moves them, give it to the guard too: `Guard(model, [first, second])`.
    """

    code: ClassVar[str] = "OPT002"
    name: ClassVar[str] = "optimizer-misses-parameters"
    needs: ClassVar[tuple[str, ...]] = ("unheld", "unstepped")
    hold: ClassVar[int] = 60
    severity: Severity = Severity.ERROR
    share: float = 1e-4

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when gradients are computed for nothing."""
        if idle := window.scalar("unstepped"):
            names = window.now.notes.get("unstepped", ())
            yield found(
                self,
                window,
                f"{int(idle)} parameters get gradients, and the optimizer that holds them has never made a step: "
                f"{listed(names, idle)}.",
                names,
                num_parameters=idle,
            )
        num, share = window.scalar("unheld"), window.scalar("unheld_share")
        if not num or window.scalar("idle") or share is None or share < self.share:
            return
        names = window.now.notes.get("unheld", ())
        yield found(
            self,
            window,
            f"{int(num)} parameters ({share:.1%} of the model) get gradients, and no optimizer holds them: "
            f"{listed(names, num)}.",
            names,
            num_parameters=num,
            share=share,
        )
