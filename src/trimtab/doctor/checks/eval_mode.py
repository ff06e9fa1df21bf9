"""MODE001: the model is in evaluation mode while it trains."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class EvalMode:
    """The model is in evaluation mode while it trains.

    ## What it means
    Dropout does nothing and BatchNorm neither uses nor updates the statistics of the batch. The loss looks fine and the
    model is worse for it.

    ## How it is checked
    Every forward pass with gradients is asked for the mode it runs in, at that moment. Frozen parts may be in
    evaluation mode.

    ## What to try
    1. Call `model.train()` at the start of every epoch, and again after each validation.
    """

    code: ClassVar[str] = "MODE001"
    name: ClassVar[str] = "eval-mode"
    title: ClassVar[str] = "the model trains in training mode"
    causes: ClassVar[tuple[str, ...]] = ("batchnorm-frozen", "dropout-inactive", "not-reproducible", "zero-gradient")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report training passes in evaluation mode."""
        calls = [(c, [e for e in c.of("forward") if e.facts["grad"] and e.facts["trainable"]]) for c in probe.calls]
        seen = [(c, forwards) for c, forwards in calls if forwards]
        bad = [c for c, forwards in seen if not any(e.facts["training"] for e in forwards)]
        if not seen:
            yield not_applicable(self, "no forward pass with gradients was seen")
        elif bad:
            name = seen[0][1][0].facts["name"]
            yield failed(
                self,
                f"{name} is in evaluation mode in its training steps.",
                f"model.training is False in {len(bad)} of {len(seen)} training forwards",
                "model.train()",
                (name,),
            )
        else:
            yield passed(self, f"model.training is True in {len(seen)} of {len(seen)} training forwards")
