"""LOSS004: the loss of a single batch does not fall."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class NotLearning:
    """The loss of a single batch does not fall.

    ## What it means
    A model that cannot overfit one batch cannot learn anything: something between data, loss and weights is wired
    wrongly.

    ## How it is checked
    The training's own step, again and again on one batch, with one seed, at the highest rate of its schedule. The loss
    is then a fixed function, and any step along its gradient that is small enough lowers it.

    ## What to try
    1. Is the sign of the loss right, is `maximize` set?
    2. Does something change the gradients or the weights between `backward()` and the next step?
    3. Is the loss that is returned the one that `backward()` was called on?
    """

    code: ClassVar[str] = "LOSS004"
    name: ClassVar[str] = "not-learning"
    title: ClassVar[str] = "the model can overfit one batch"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report a loss that stays where it is."""
        if probe.no_experiments:
            yield not_applicable(self, probe.no_experiments)
            return
        here = probe.overfit()
        if here is None:
            yield not_applicable(self, "the step returns no loss, or ended with an exception")
        elif len(probe.optimizers) > 1:
            yield not_applicable(self, f"{len(probe.optimizers)} optimizers share the loss: it need not fall")
        elif here.fell:
            yield passed(self, f"from {here.first:.4g} to {here.last:.4g} in {here.num} calls on one batch")
        elif here.first == 0 or here.num_steps < 2:
            yield not_applicable(self, f"the loss is {here.first:.4g}; {here.num_steps} steps were made")
        else:
            slower = probe.overfit(0.01)
            if slower is not None and slower.fell:
                yield passed(self, f"from {slower.first:.4g} to {slower.last:.4g} at a hundredth of the rate")
                return
            yield failed(
                self,
                "the loss of a single batch does not fall, however long it is trained on.",
                f"from {here.first:.6g} to {here.last:.6g} in {here.num} calls, with the gradient norm at "
                f"{here.norm:.3g}",
                "# is the sign of the loss right, and is it the loss that backward() was called on?",
                ("loss",),
                first=here.first,
                last=here.last,
            )
