"""GRAD005: parameters that should learn get no gradient at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from trimtab.core.stats.row_history import is_trunk, relieved, routed
from trimtab.core.types import ABSENT, FROZEN, Column, Finding, Kind, Severity
from trimtab.core.window import Window, found, listed


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingGradient:
    """Parameters that should learn get no gradient at all.

    ## What it sees
    A parameter that requires a gradient and is held by the optimizer has had none (`None`, not zero) for `persist`
    steps since the start, or lost the one it had. Together such parameters must be a real part of the model
    (`share`). Frozen parameters do not count, and neither do rows that come and go: routed experts (siblings of a
    module that do get gradients), heads that take turns, and stages of which one takes over from another.

    ## Why it matters
    The part of the model behind a `detach()`, a `no_grad` block, a branch that is never called or a graph that was
    cut stays as it was initialised. The rest learns around it, so the loss falls and nobody notices.

    ## What to try
    1. If they are meant to be frozen, say so: `requires_grad_(False)`.
    """

    code: ClassVar[str] = "GRAD005"
    name: ClassVar[str] = "missing-gradient"
    needs: ClassVar[tuple[str, ...]] = ("grad_norm",)
    hold: ClassVar[int] = 50
    calm: ClassVar[bool] = True
    severity: Severity = Severity.ERROR
    persist: int = 3
    learned: int = 10
    share: float = 0.01

    def check(self, window: Window) -> Iterator[Finding]:
        """Fire when the same parameters lack a gradient for several steps."""
        runs, sample = window.runs, window.now
        names = sample.names(Kind.GRAD)
        if runs.calm or runs.names != names:
            return
        norms = sample.col(Kind.GRAD, Column.L2)
        absent = norms == ABSENT
        if not absent.any() or window.scalar("no_grad_forward") or window.scalar("loss_detached"):
            return
        never = (runs.absent >= self.persist) & (runs.real == 0)
        lost = (runs.absent >= self.persist) & (runs.real >= self.learned) & (runs.gaps == 0)
        stuck = absent & (never | lost) & (runs.gaps == 0)
        if not stuck.any():
            return
        # Everything in front of some layer is cut off; or what is missing is no sibling of something that is there.
        present = ~absent & (norms != FROZEN)
        sizes = np.array(sample.layout.numel[sample.layout.rows(Kind.GRAD)], np.float64)
        cut = is_trunk(names, stuck, present & (sizes > 1))  # a lone scale stands anywhere
        if not cut and not lost.any():
            stuck &= ~routed(names, sizes, present | (runs.real > 0))
        elif not cut:
            stuck &= ~relieved(runs, sizes) & ~(routed(names, sizes, runs.real > 0) & (runs.real == 0))
        if not stuck.any() or sizes[stuck].sum() < self.share * sizes[norms != FROZEN].sum():
            return
        which = tuple(n for n, bad in zip(names, stuck, strict=True) if bad)
        yield found(
            self,
            window,
            f"{len(which)} of {len(names)} parameters that require a gradient have none: {listed(which)}.",
            which[:8],
            num_parameters=len(which),
            steps=float(runs.absent[stuck].max() + 1),
        )
