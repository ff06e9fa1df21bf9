"""OPT003: the optimizer holds parameters the model no longer has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, passed
from trimtab.doctor.probe import Probe


class StaleOptimizer:
    """The optimizer holds parameters the model no longer has.

    ## What it means
    It was built before a module was replaced, copied or re-initialised. The new parameters are never moved; the old
    ones are kept alive for nothing.

    ## How it is checked
    The parameters of the optimizers are compared with those of the model: some that it has are in no optimizer, while
    the optimizer has others that got no gradient.

    ## What to try
    1. Build the optimizer last, when the model is complete and on its device.
    2. After replacing a head: `optimizer.add_param_group({"params": model.head.parameters()})`.
    """

    code: ClassVar[str] = "OPT003"
    name: ClassVar[str] = "stale-optimizer"
    title: ClassVar[str] = "the optimizer holds the model's own parameters"
    causes: ClassVar[tuple[str, ...]] = (
        "optimizer-misses-parameters",
        "weights-unchanged",
        "not-learning",
        "missing-gradient",
        "learning-rate",
        "duplicate-parameters",
        "not-learning",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report what is held in vain, where something is missed."""
        mine = {id(p) for p in probe.model.parameters()}
        given = {key for e in probe.events("step") for key in e.facts["gradients"].present}
        old = [p for key, p in probe.held.items() if key not in mine and key not in given]
        missed = tuple(n for n, p in probe.trainable.items() if id(p) not in probe.held)
        if old and (missed or not any(key in mine for key in probe.held)):
            yield failed(
                self,
                f"the optimizer holds {len(old)} parameters the model does not have, and misses {len(missed)} it has.",
                f"not moved: {listed(missed)}; {len(probe.held) - len(old)} of {len(probe.held)} held are the model's",
                "optimizer = torch.optim.AdamW(model.parameters(), lr=lr)  # after the model is complete",
                missed[:8],
                num_old=float(len(old)),
                num_missed=float(len(missed)),
            )
        else:
            yield passed(self, f"{len(probe.held)} parameters in {len(probe.optimizers)} optimizer(s)")
