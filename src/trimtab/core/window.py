"""What a rule may look at: the newest sample, and bounded history from before it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.core.baseline import RowBaseline
from trimtab.core.series import Series
from trimtab.core.types import Column, Kind, Sample

TRACKED = ("loss", "grad_norm", "val_loss")
ROWS_EVERY = 10
"""The baseline of single rows only attributes alarms: it need not see every step."""
MAX_LEFT_OUT = 16
"""So many alarming samples in a row stay out of the history; after that they are the new normal."""


class Window:
    """The newest sample beside the history of the samples before it. Memory does not grow with the run."""

    def __init__(self) -> None:
        self._now: Sample | None = None
        self._series = {name: Series() for name in TRACKED}
        self._gradients = RowBaseline()
        self._left_out = 0

    @property
    def now(self) -> Sample:
        """The sample being judged."""
        if self._now is None:
            raise LookupError("the window is empty: look() at a sample first")
        return self._now

    @property
    def gradients(self) -> RowBaseline:
        """What is usual for the gradient norm of each parameter."""
        return self._gradients

    def scalar(self, name: str) -> float | None:
        """A scalar of the newest sample, None where it was not measured."""
        return self.now.scalars.get(name)

    def history(self, name: str) -> Series:
        """What a scalar was before the newest sample."""
        return self._series[name]

    def look(self, sample: Sample) -> None:
        """Make `sample` the newest one. It joins the history only with `absorb`."""
        self._now = sample

    def absorb(self, *, alarming: bool) -> None:
        """Let the newest sample into the history, unless it is alarming and the alarm is young."""
        sample = self.now
        if alarming and self._left_out < MAX_LEFT_OUT:
            self._left_out += 1
            return
        if not alarming:
            self._left_out = 0
        for name, series in self._series.items():
            value = sample.scalars.get(name)
            if value is not None:
                series.push(value)
        if sample.step % ROWS_EVERY == 0 and sample.has(Kind.GRAD, Column.L2):
            self._gradients.push(sample.names(Kind.GRAD), sample.col(Kind.GRAD, Column.L2))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {
            "series": {name: s.state_dict() for name, s in self._series.items()},
            "gradients": self._gradients.state_dict(),
            "left_out": self._left_out,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._series = {n: Series.from_state(state["series"][n]) if n in state["series"] else Series() for n in TRACKED}
        self._gradients = RowBaseline.from_state(state["gradients"])
        self._left_out = int(state["left_out"])
