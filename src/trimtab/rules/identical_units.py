"""WGT006: all units of a layer have the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.types import Finding, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class IdenticalUnits:
    """All units of a layer have the same weights.

    ## What it sees
    After 10 and after 30 steps every row of a weight matrix is equal to the first one, although it has a gradient. The
    biases may differ. A matrix of zeros is not judged: it gets different rows with its first gradient, or none.

    ## Why it matters
    Units that begin alike get the same gradients and stay alike: a layer of 512 then does the work of one. The loss
    falls a little, and stops.

    ## What to try
    1. Initialise the weights at random (`torch.nn.init.kaiming_uniform_`, `xavier_uniform_`), not with a constant.
    2. Look for code that writes one value or one row to all of the weight, such as `constant_` or a broadcast copy.
    """

    code: ClassVar[str] = "WGT006"
    name: ClassVar[str] = "identical-units"
    needs: ClassVar[tuple[str, ...]] = ("twin_units",)
    hold: ClassVar[int] = 100
    severity: Severity = Severity.ERROR

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when a look found any."""
        num, names = window.scalar("twin_units"), window.now.notes.get("twin_units", ())
        if not num:
            return
        yield found(
            self,
            window,
            f"all units have the same weights, and get the same gradients, in {listed(names, num)}.",
            names,
            num_layers=num,
        )
