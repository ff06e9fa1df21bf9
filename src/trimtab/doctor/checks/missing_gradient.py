"""GRAD005: parameters that should learn get no gradient at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.gradient_reach import active, never, ran_without_grad, was_called, without_routed
from trimtab.doctor.probe import Probe


class MissingGradient:
    """Parameters that should learn get no gradient at all.

    ## What it means
    They lie behind a `detach()`, a `no_grad` block, or in a branch that is never called, and stay as they are.

    ## How it is checked
    At the moment of each step, over several batches: a trainable parameter in an optimizer that never has a gradient.
    Experts that no token was sent to, and other numbered twins of modules that do get gradients, are left alone.

    ## What to try
    1. Look between these parameters and the loss for `.detach()`, `.data`, numpy, `torch.no_grad()` or a branch not
       called.
    2. If they are meant to be frozen: `requires_grad_(False)`. If they are not used: remove them.
    """

    code: ClassVar[str] = "GRAD005"
    name: ClassVar[str] = "missing-gradient"
    title: ClassVar[str] = "gradients reach every trainable parameter"
    causes: ClassVar[tuple[str, ...]] = ("weights-unchanged", "not-learning", "zero-gradient")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report parameters without any gradient."""
        if not probe.trainable:
            yield failed(
                self,
                "no parameter of the model requires a gradient: everything is frozen.",
                f"requires_grad is False for all {sum(1 for _ in probe.model.parameters())} parameters",
                "model.requires_grad_(True)",
                tuple(n for n, _ in probe.model.named_parameters())[:8],
            )
            return
        if probe.no_steps:
            yield not_applicable(self, probe.no_steps)
            return
        mine = active(probe)
        lacking = never(probe, mine, lambda norm: norm is not None)
        if lacking and not probe.too_slow:
            lacking = never(probe, mine, lambda norm: norm is not None, more=True)
        lacking = without_routed(lacking, mine)
        if lacking:
            off = {n for n in lacking if ran_without_grad(probe, n)}
            why = " (their modules ran under no_grad)" if off else ""
            uncalled = tuple(n for n in lacking if not was_called(probe, n))
            if uncalled and not off:
                why = f" ({len(uncalled)} of them in modules that were never called)"
            yield failed(
                self,
                f"{len(lacking)} of {len(mine)} trainable parameters never get a gradient{why}.",
                listed(tuple(lacking)),
                "h = encoder(x)  # without .detach() or no_grad; or requires_grad_(False) if it is meant to be frozen",
                tuple(lacking)[:8],
                num=float(len(lacking)),
            )
        else:
            yield passed(self, f"{len(mine)} of {len(mine)} parameters have one at their step")
