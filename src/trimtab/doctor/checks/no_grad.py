"""MODE002: the model is called with gradients switched off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class NoGrad:
    """The model is called with gradients switched off.

    ## What it means
    No graph is recorded, so there is nothing to go back through: `backward()` raises, or nothing learns.

    ## How it is checked
    Every forward pass is asked whether gradients are on, at that moment.

    ## What to try
    1. Look for `torch.no_grad()`, `torch.inference_mode()` or `torch.set_grad_enabled(False)` around the step.
    """

    code: ClassVar[str] = "MODE002"
    name: ClassVar[str] = "no-grad"
    title: ClassVar[str] = "gradients are switched on"
    causes: ClassVar[tuple[str, ...]] = (
        "loss-detached",
        "missing-gradient",
        "zero-gradient",
        "weights-unchanged",
        "loss-ignores-input",
        "not-learning",
        "gradcheck",
        "step-exception",
        "optimizer-misses-parameters",
        "eval-mode",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report forward passes without a graph."""
        forwards = probe.events("forward")
        off = [e for e in forwards if not e.facts["grad"] or not self._inside(probe, e.call)]
        if not forwards:
            yield not_applicable(self, "no forward pass of the model was seen")
        elif len(off) == len(forwards) or probe.failed_as == self.name:
            yield failed(
                self,
                "the model is called with gradients switched off.",
                f"{len(off)} of {len(forwards)} forward passes ran under no_grad or inference_mode"
                + (f"; {probe.failure.text[:100]}" if probe.failure else ""),
                "with torch.enable_grad(): loss = step(model, batch)  # and take the no_grad() away",
                ("loss",),
            )
        else:
            yield passed(self, f"gradients were on in {len(forwards) - len(off)} of {len(forwards)} forward passes")

    @staticmethod
    def _inside(probe: Probe, call: int) -> bool:
        """Whether any layer with weights ran with gradients on: a decorated forward switches them off inside."""
        own = {id(m) for m in probe.model.modules() if any(p.requires_grad for p in m.parameters(recurse=False))}
        modes = [grad for key, (_, grad) in probe.calls[call].modules.items() if key in own]
        return not modes or any(modes)
