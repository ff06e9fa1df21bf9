"""Listens to what a guard records: gradient norms, clipped and rejected steps, and the actions that were taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.core.types import Outcome, Record, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """The gradient norms of some steps before clipping, and how many of the steps were clipped or rejected."""

    average: float
    highest: float
    num_steps: int
    num_clipped: int
    num_rejected: int

    @property
    def clipped_frac(self) -> float:
        """The share of steps that were clipped."""
        return self.num_clipped / self.num_steps if self.num_steps else 0.0


class Meter:
    """A sink that keeps one short line per step. What it knows is complete once the guard is closed.

    Example:
        >>> import numpy as np
        >>> from trimtab.core.types import Layout
        >>> meter, empty = Meter(), Layout(names=(), kinds=(), numel=())
        >>> for step, norm in enumerate((2.0, 0.5)):
        ...     scalars = {"grad_norm": norm, "clip_coef": min(1.0, 1.0 / norm)}
        ...     meter.write(Sample(step=step, layout=empty, table=np.empty((0, 7)), scalars=scalars))
        >>> meter.norms(0, 2)
        Norms(average=1.25, highest=2.0, num_steps=2, num_clipped=1, num_rejected=0)
    """

    def __init__(self) -> None:
        self.outcomes: list[Outcome] = []
        self.losses: dict[int, float] = {}
        self._steps: dict[int, tuple[float, bool, bool]] = {}
        self._seen: set[tuple[int, str]] = set()

    def write(self, record: Record) -> None:
        """Take in a step, or an action that was carried out."""
        if isinstance(record, Sample) and record.phase == "train":
            scalars = record.scalars
            clipped = scalars.get("clip_coef", 1.0) < 1.0
            rejected = scalars.get("rejected", 0.0) > 0 or scalars.get("scaler_skipped", 0.0) > 0
            self._steps[record.step] = (scalars.get("grad_norm", math.nan), clipped and not rejected, rejected)
            if "loss" in scalars:
                self.losses[record.step] = float(scalars["loss"])
        elif isinstance(record, Outcome) and record.applied and record.action.kind != "skip":
            key = record.at, record.action.kind
            if key not in self._seen:  # the same action comes again, later, with what became of it
                self._seen.add(key)
                self.outcomes.append(record)

    def close(self) -> None:
        """Nothing to close."""

    @property
    def last_norm(self) -> float:
        """The gradient norm of the newest step; NaN before there is any."""
        return self._steps[max(self._steps)][0] if self._steps else math.nan

    def norms(self, begin: int, end: int) -> Norms:
        """Of the steps from `begin` to before `end`, as far as they are known."""
        steps = [self._steps[i] for i in range(begin, end) if i in self._steps]
        known = [norm for norm, _, _ in steps if math.isfinite(norm)]
        return Norms(
            average=math.fsum(known) / len(known) if known else math.nan,
            highest=max(known, default=math.nan),
            num_steps=len(steps),
            num_clipped=sum(clipped for _, clipped, _ in steps),
            num_rejected=sum(rejected for _, _, rejected in steps),
        )
