"""WIRE027: the loss does not depend on the targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.input_target import other_targets
from trimtab.doctor.probe import Probe


class LossIgnoresTarget:
    """The loss does not depend on the targets.

    ## What it means
    It is computed from something else: the model's own predictions, a constant, another variable of the same name.

    ## How it is checked
    One step with the targets of other samples and the same inputs, weights and random numbers: loss and gradients must
    differ. Only for a `loss_fn(output, target)` that compares with labels; a loss that makes its own targets
    (contrastive, self-supervised) is left alone.

    ## What to try
    1. Follow the target from the batch into the loss.
    """

    code: ClassVar[str] = "WIRE027"
    name: ClassVar[str] = "loss-ignores-target"
    title: ClassVar[str] = "the loss depends on the target"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "targets-do-not-predict")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report losses that stay the same with other targets."""
        facts = probe.facts
        if probe.no_experiments or probe.target.step_fn is not None or not facts.kind:
            why = "it is not known which part of the batch is the target, or whether the loss compares with it"
            yield not_applicable(self, probe.no_experiments or why)
            return
        own = facts.target
        made = own is not None and own.dim() == 1 and torch.equal(own, torch.arange(len(own), device=own.device))
        changed = None if made or facts.kind not in ("nll", "bce", "bce-logits") else other_targets(probe)
        if changed is None:
            yield not_applicable(self, "the loss makes its own targets, or there is none that could be replaced")
            return
        plain, other = probe.once(probe.batch(0)), probe.once(changed)
        if plain.failure is not None or other.failure is not None or plain.loss is None or other.loss is None:
            yield not_applicable(self, "a step with other targets ended with an exception")
        elif plain.loss == other.loss and plain.grad_norms == other.grad_norms and any(plain.grad_norms):
            yield failed(
                self,
                "the loss is the same whatever the targets are.",
                f"{plain.loss:.6g} with its own targets, {other.loss:.6g} with those of other samples",
                "loss = loss_fn(output, y)  # is y the target of the batch?",
                ("targets",),
            )
        else:
            yield passed(self, f"{plain.loss:.4g} with its own targets, {other.loss:.4g} with others")
