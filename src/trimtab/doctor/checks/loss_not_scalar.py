"""WIRE003: the loss is not one number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class LossNotScalar:
    """The loss is not one number.

    ## What it means
    Only a single number can be minimised. A loss per sample must be averaged first.

    ## How it is checked
    The shape of what the step returns.

    ## What to try
    1. `reduction="mean"`, or `loss.mean()`.
    """

    code: ClassVar[str] = "WIRE003"
    name: ClassVar[str] = "loss-not-scalar"
    title: ClassVar[str] = "the loss is one number"
    causes: ClassVar[tuple[str, ...]] = (
        "step-exception",
        "weights-unchanged",
        "not-learning",
        "missing-gradient",
        "gradcheck",
        "loss-detached",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report losses of several numbers."""
        if not probe.calls:
            yield not_applicable(self, "no step was made")
            return
        call = probe.calls[0]
        several = call.loss_shape is not None and any(n != 1 for n in call.loss_shape) and probe.doctor_steps
        if call.loss_kind == "NoneType" and probe.doctor_steps and call.failure is None:
            yield failed(
                self,
                "the step returns nothing, and runs no backward pass.",
                "step_fn(model, batch) returned None",
                "return loss",
                ("loss",),
            )
            return
        if several or probe.failed_as == self.name:
            yield failed(
                self,
                "the loss is a tensor of several numbers.",
                f"shape {call.loss_shape}",
                'loss = loss.mean()  # or reduction="mean"',
                ("loss",),
            )
        elif call.loss_shape is None:
            yield not_applicable(self, f"the step returned a {call.loss_kind or 'nothing'}")
        else:
            yield passed(self, f"shape {call.loss_shape}")
