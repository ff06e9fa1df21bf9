"""WIRE004: the loss does not depend on the input."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.input_target import other_inputs
from trimtab.doctor.probe import Probe


class LossIgnoresInput:
    """The loss does not depend on the input.

    ## What it means
    The model, or the loss, uses something else instead of the data: the wrong variable, a constant, the target itself.

    ## How it is checked
    One step with the inputs of other samples and the same targets, weights and random numbers: loss and gradients must
    differ.

    ## What to try
    1. Follow the batch into the model and its output into the loss: is each the variable you think it is?
    """

    code: ClassVar[str] = "WIRE004"
    name: ClassVar[str] = "loss-ignores-input"
    title: ClassVar[str] = "the loss depends on the input"
    causes: ClassVar[tuple[str, ...]] = (
        "not-learning",
        "targets-do-not-predict",
        "collapsed-output",
        "initial-loss",
        "zero-gradient",
        "loss-ignores-target",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report losses that stay the same on other data."""
        if probe.no_experiments:
            yield not_applicable(self, probe.no_experiments)
            return
        changed = other_inputs(probe)
        if changed is None:
            yield not_applicable(self, "the batch holds no input that could be replaced")
            return
        plain, other = probe.once(probe.batch(0)), probe.once(changed)
        if other.failure is not None or plain.failure is not None:
            yield not_applicable(self, "a step with replaced inputs ended with an exception")
            return
        same = plain.loss == other.loss and plain.grad_norms == other.grad_norms
        if same and plain.loss is not None and math.isfinite(plain.loss) and any(plain.grad_norms):
            yield failed(
                self,
                "the loss is the same whatever the input is.",
                f"{plain.loss:.6g} with its own inputs, {other.loss:.6g} with those of other samples; gradients equal",
                "loss = loss_fn(model(x), y)  # is x the batch, and is its output what the loss gets?",
                ("loss",),
            )
        elif plain.loss is None or other.loss is None:
            yield passed(self, "gradients differ when the inputs do")
        else:
            yield passed(self, f"{plain.loss:.4g} with its own inputs, {other.loss:.4g} with others")
