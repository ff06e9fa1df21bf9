"""WIRE028: the loss is made larger instead of smaller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.torchutil.optimizers import groups_of


class LossSign:
    """The loss is made larger instead of smaller.

    ## What it means
    Its sign is flipped, or `maximize` is set: the model learns to be wrong.

    ## How it is checked
    The factor with which a cross-entropy or squared error enters the backward pass, as autograd knows it, and the
    optimizer's `maximize`. Two adversarial models may each have their own sign.

    ## What to try
    1. `loss.backward()`, not `(-loss).backward()`; `maximize=False`.
    """

    code: ClassVar[str] = "WIRE028"
    name: ClassVar[str] = "loss-sign"
    title: ClassVar[str] = "the loss is made smaller"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "learning-rate", "optimizer-settings", "initial-loss")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report a flipped sign."""
        passes = [e for e in probe.events("backward") if e.facts.get("kind") and e.facts.get("factors")]
        if not passes or len(probe.optimizers) != 1:
            yield not_applicable(self, "the sign of this loss is not known, or several optimizers share it")
            return
        up = any(g.get("maximize") for g in groups_of(*probe.optimizers))
        factor = passes[0].facts["factors"][0]
        if (factor < 0) != up:
            yield failed(
                self,
                "the loss is made larger, not smaller.",
                f"the {passes[0].facts['kind']} loss enters with a factor of {factor:.3g}, maximize is {up}",
                "loss.backward()  # not -loss; and maximize=False",
                ("loss",),
                factor=factor,
            )
        else:
            yield passed(self, f"the {passes[0].facts['kind']} loss enters with a factor of {factor:.3g}")
