"""WIRE025: a training that is saved and resumed goes on differently."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.doctor.repeatability import resumed


class ResumeDiffers:
    """A training that is saved and resumed goes on differently.

    ## What it means
    The state of the optimizer, the scheduler, the scaler or the average is not all in its `state_dict`.

    ## How it is checked
    As for the round trip of the model, with the states of all of them: the weights after the next step must be
    bit-identical.

    ## What to try
    1. Save and load `optimizer`, `scheduler`, `scaler` and `ema` as well; `trimtab.Checkpointer` does all of it.
    """

    code: ClassVar[str] = "WIRE025"
    name: ClassVar[str] = "resume-differs"
    title: ClassVar[str] = "a resumed training goes on exactly"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report a different next step."""
        why = probe.no_experiments or (probe.failed_as and "a step ended with an exception")
        found = None if why else resumed(probe)
        if found is None or found.error or found.loss is None or found.loss != found.again:
            yield not_applicable(self, why or "the model itself is not restored exactly")
        elif found.same_weights:
            yield passed(self, "the weights after the next step are bit-identical")
        else:
            yield failed(
                self,
                "the next step after a resume differs.",
                f"{found.num_different} parameters differ after it, at most by {found.difference:.2g}",
                "torch.save({'optimizer': optimizer.state_dict(), ...})  # or trimtab.Checkpointer",
                ("optimizer",),
            )
