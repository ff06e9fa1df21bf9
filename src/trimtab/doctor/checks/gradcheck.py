"""WIRE022: the gradients are not those of the loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.experiments.gradient_accuracy import Slope, slopes
from trimtab.doctor.probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradcheck:
    """The gradients are not those of the loss.

    ## What it means
    A hand-written backward pass, a hook or a `.data` trick gives a direction in which the loss does not fall as fast as
    the gradient says, or rises.

    ## How it is checked
    Part by part of the model: the loss a small step along the gradient ahead and behind, with the same batch and the
    same random numbers, in steps of several sizes. Only where these agree with each other and not with the gradient is
    anything said. Gradients that are meant to be different (reversal, straight-through) show here as well: then ignore
    this check.

    ## What to try
    1. `torch.autograd.gradcheck(YourFunction.apply, inputs)` in double precision.
    2. Look for `register_hook`, `.data` and in-place changes under `no_grad`.
    """

    code: ClassVar[str] = "WIRE022"
    name: ClassVar[str] = "gradcheck"
    title: ClassVar[str] = "gradients are those of the loss"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "learning-rate")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report gradients that lead elsewhere."""
        why = probe.no_steps or probe.too_slow
        found: list[Slope] | str = why or slopes(probe)
        if isinstance(found, str):
            yield not_applicable(self, found)
            return
        sure = [s for s in found if s.converged]
        wrong = [s for s in sure if not s.fits]
        if wrong:  # a second opinion from beside the kinks that zeros put a training on
            again = slopes(probe, nudged=True)
            still = {s.part for s in again if s.converged and not s.fits} if isinstance(again, list) else set()
            wrong = [s for s in wrong if s.part in still]
        if not sure:
            yield not_applicable(self, "the loss is too rough for finite differences")
            return
        if not wrong:
            worst = max(sure, key=lambda s: abs(s.measured / s.claimed - 1.0))
            yield passed(self, f"{len(sure)} parts, the worst off by {abs(worst.measured / worst.claimed - 1.0):.1%}")
            return
        one = wrong[0]
        made = probe.facts.custom
        hooks = tuple(n for n, p in probe.trainable.items() if p._backward_hooks)
        told = f"along its gradient {one.part} changes the loss by {one.measured:.3g}, not {one.claimed:.3g}, per unit"
        tell = failed if made or hooks else warned
        yield tell(
            self,
            f"the gradient of {listed(tuple(s.part for s in wrong))} is not that of the loss.",
            told
            + (f"; hand-written: {', '.join(made[:3])}" if made else "")
            + (f"; hooks on {listed(hooks)}" if hooks else ""),
            "torch.autograd.gradcheck(YourFunction.apply, (x.double().requires_grad_(),))",
            tuple(s.part for s in wrong)[:8],
            measured=one.measured,
            claimed=one.claimed,
        )
