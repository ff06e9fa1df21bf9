"""GRAD001: a gradient is NaN or Inf while the loss is finite."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class NonfiniteGradient:
    """A gradient is NaN or Inf while the loss is finite.

    ## What it means
    The derivative of a finite value can be infinite: `sqrt` or a norm at 0, `acos` at 1, a power of 0; and
    `torch.where` passes NaN on from the side that was not chosen.

    ## How it is checked
    The gradients at the moment of each step. What a GradScaler skips by itself is routine.

    ## What to try
    1. Put the epsilon inside: `torch.sqrt(x + eps)`.
    2. Run with `--detect_anomaly true` to see the operation.
    """

    code: ClassVar[str] = "GRAD001"
    name: ClassVar[str] = "nonfinite-gradient"
    title: ClassVar[str] = "gradients are finite"
    causes: ClassVar[tuple[str, ...]] = (
        "not-learning",
        "learning-rate",
        "weights-unchanged",
        "nonfinite-weight",
        "nonfinite-loss",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report gradients that are NaN or Inf."""
        sound = [c for c in probe.through if c.loss is None or math.isfinite(c.loss)]
        steps = [e for c in sound for e in c.of("step") if not e.facts["in_scaler"]]
        if not steps:
            yield not_applicable(self, probe.no_steps or "every step goes through a GradScaler, which looks itself")
            return
        bad = {key for e in steps for key, norm in e.facts["gradients"].present.items() if not math.isfinite(norm)}
        if bad:
            names = tuple(probe.names[k] for k in bad if k in probe.names)
            yield failed(
                self,
                f"{len(bad)} gradients are NaN or Inf.",
                f"{listed(names)}; the first loss is {probe.calls[0].loss}",
                "torch.sqrt(x + 1e-8)  # the epsilon inside; --detect_anomaly true names the operation",
                names[:8],
            )
        else:
            norm = math.hypot(*steps[0].facts["gradients"].present.values())
            yield passed(self, f"{len(steps)} steps, the first with a norm of {norm:.3g}")
