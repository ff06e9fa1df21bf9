"""STEP001: the training step ends with an exception."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class StepException:
    """The training step ends with an exception.

    ## What it means
    Nothing is trained at all. Where PyTorch's words say what is wrong, the line has that name instead.

    ## How it is checked
    The first steps are made as the training makes them. The exception, the module that was running and the line of your
    own code are shown.

    ## What to try
    1. Go to the line that is named: it is the innermost of your own code.
    2. Compare the shapes and types printed there with those that the layer was built for.
    """

    code: ClassVar[str] = "STEP001"
    name: ClassVar[str] = "step-exception"
    title: ClassVar[str] = "a training step comes to its end"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report what ended the steps, where it has no other name."""
        failure = probe.failure
        if failure is None and not probe.calls:
            yield not_applicable(self, "there was no batch to make a step with")
        elif failure is None or probe.failed_as != self.name:
            done = len(probe.through)
            yield (
                passed(self, f"{done} calls, {probe.num_steps} optimizer steps")
                if failure is None
                else not_applicable(self, f"see {probe.failed_as}")
            )
        else:
            where = f" in {failure.module}" if failure.module else ""
            yield failed(
                self,
                f"the {failure.phase} pass raised {failure.kind}{where}: {failure.text[:200]}",
                f"call {len(probe.calls) - 1}, at {failure.where or 'an unknown place'}",
                f"# fix {failure.where}" if failure.where else "# see the traceback with --json",
                (failure.module,) if failure.module else (),
            )
