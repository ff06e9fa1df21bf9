"""OPT005: the optimizer has forgotten its moments in the middle of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStateLost:
    """The optimizer has forgotten its moments in the middle of a run.

    ## What it sees
    The optimizer had state, and now it has none, counts fewer steps than before, or all its moments are zero. State
    that comes through `load_state_dict` is taken as meant.

    ## Why it matters
    Adam begins again with zero moments but a full learning rate: the first steps after it are as large as at the very
    start, without warm-up. A resume that saves optimizer state and never loads it looks just like this.

    ## What to try
    1. Load the optimizer state on resume, after the parameters are on their device.
    2. Do not build a new optimizer or clear `optimizer.state` in the middle of a run; where it is meant, warm the
       rate up again.
    """

    code: ClassVar[str] = "OPT005"
    name: ClassVar[str] = "optimizer-state-lost"
    needs: ClassVar[tuple[str, ...]] = ("state_lost",)
    hold: ClassVar[int] = 20
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when state is gone."""
        lost = window.scalar("state_lost")
        if lost:
            yield found(
                self, window, "the optimizer had moments after the last step and has lost them since.", lost=lost
            )
