"""WIRE019: outputs and targets of different shapes are spread over each other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.experiments.operation_trace import broadcasts
from trimtab.doctor.probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBroadcast:
    """Outputs and targets of different shapes are spread over each other.

    ## What it means
    `[B, 1]` minus `[B]` is `[B, B]`: each prediction is compared with every target, and the model learns their mean.

    ## How it is checked
    PyTorch's own warning, and one look at every subtraction of a step in which a column meets a row.

    ## What to try
    1. `output.squeeze(-1)`, or `y.unsqueeze(-1)`.
    """

    code: ClassVar[str] = "WIRE019"
    name: ClassVar[str] = "loss-broadcast"
    title: ClassVar[str] = "outputs and targets pair up"
    causes: ClassVar[tuple[str, ...]] = ("targets-do-not-predict", "not-learning", "initial-loss")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report pairs that are none."""
        told = next((w for c in probe.calls for w in c.warnings if w.startswith("Using a target size")), "")
        seen = broadcasts(probe) if not told and probe.through else []
        if told or seen:
            yield failed(
                self,
                "outputs and targets of different shapes are spread over each other.",
                told.partition(". This will")[0][:160] or (seen or [""])[0],
                "loss = loss_fn(output.squeeze(-1), y)",
                ("loss",),
            )
        elif not probe.through:
            yield not_applicable(self, probe.no_steps)
        elif seen is None:
            yield not_applicable(self, "the step cannot be made under a look at every operation")
        else:
            yield passed(self, "no column meets a row in the loss")
