"""WIRE008: a value that the backward pass needs was changed in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from trimtab.doctor.batch_tensors import fresh
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.observed_step import as_loss
from trimtab.doctor.probe import Probe
from trimtab.doctor.target import raw_loss
from trimtab.torchutil.trial_pass import check_inplace_operations


class InPlaceHazard:
    """A value that the backward pass needs was changed in place.

    ## What it means
    Autograd saved a tensor, and `+=`, `relu_()`, an indexed assignment or the like changed it afterwards. The gradient
    cannot be computed any more.

    ## How it is checked
    The step is made once more with everything recorded that autograd saves and the module that runs: the tensor that
    changed is named with where it was saved and where it was changed. An `inplace=True` that harms nothing is not
    reported.

    ## What to try
    1. `x = x + y` instead of `x += y`; `F.relu(x)` instead of `x.relu_()`.
    2. Clone the tensor before it is changed.
    """

    code: ClassVar[str] = "WIRE008"
    name: ClassVar[str] = "in-place-hazard"
    title: ClassVar[str] = "no value is changed that backward needs"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Translate autograd's error into modules and lines."""
        failure = probe.failure
        if failure is None or probe.failed_as != self.name:
            yield (
                passed(self, f"backward came through {len(probe.events('backward'))} times")
                if probe.events("backward") and failure is None
                else not_applicable(self, probe.no_steps or "no backward pass was seen")
            )
            return
        hazards = _hazards(probe)
        what = hazards[0] if hazards else failure.text[:240]
        yield failed(
            self,
            f"the backward pass needs a value that was changed in place: {what}",
            f"{failure.kind} at {failure.where}",
            "x = x + y  # instead of x += y; or x = x.clone() before it",
            tuple(hazards[1:3]),
        )


def _hazards(probe: Probe) -> tuple[str, ...]:
    """The sentence, and the modules that saved and changed it; empty where it could not be seen again."""
    target, batch = probe.target, fresh(probe.batch(len(probe.calls) - 1))

    def step() -> object:
        loss = as_loss(raw_loss(target, batch))
        # A step that has gone back by itself leaves nothing to go back through.
        return (
            loss if probe.doctor_steps else torch.zeros((), requires_grad=True, dtype=torch.float32, device="cpu") * 1.0
        )

    try:
        with probe.trial(rates=False):
            found = check_inplace_operations(step, model=target.model)
    except Exception:
        return ()
    return (found[0].message, found[0].saved_in, found[0].changed_in) if found else ()
