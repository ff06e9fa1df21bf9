"""LOSS001: the loss is NaN or Inf."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class NonfiniteLoss:
    """The loss is NaN or Inf.

    ## What it means
    Every gradient of such a step is NaN. With finite data and finite weights, an operation in the model or the loss
    makes it: a logarithm or a division by zero, an exponential that overflows, a mask that hides everything.

    ## How it is checked
    The losses of the first steps, from the weights as they are.

    ## What to try
    1. Run with `--detect_anomaly true` to see the operation.
    2. Add an epsilon inside the logarithm, the root or the division; compute in log-space.
    """

    code: ClassVar[str] = "LOSS001"
    name: ClassVar[str] = "nonfinite-loss"
    title: ClassVar[str] = "the loss is finite"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report losses that are NaN or Inf."""
        seen = [c.loss for c in probe.through if c.loss is not None]
        bad = [i for i, v in enumerate(seen) if not math.isfinite(v)]
        if not seen:
            yield not_applicable(self, probe.no_steps or "the step returns no loss")
        elif bad and any(not math.isfinite(r) for rates in probe.peak_rates for r in rates):
            yield not_applicable(self, "a learning rate is not finite: see learning-rate")
        elif bad and bad[0] > 0 and not probe.too_slow and self._by_rate(probe):
            yield not_applicable(self, "the first losses are finite, and at a thousandth of the rate they stay so")
        elif bad:
            yield failed(
                self,
                f"the loss is {seen[bad[0]]} in step {bad[0]}.",
                f"{len(bad)} of {len(seen)} losses are not finite; the first is {seen[0]:.4g}",
                "trimtab doctor ... --detect_anomaly true  # names the operation",
                ("loss",),
            )
        else:
            yield passed(self, f"losses {', '.join(f'{v:.4g}' for v in seen[:4])}")

    @staticmethod
    def _by_rate(probe: Probe) -> bool:
        """Whether smaller steps keep the loss finite: then it is the rate that is wrong."""
        with probe.trial():
            probe.scale_rates(1e-3)
            calls = probe.run([probe.batch(i) for i in range(len(probe.calls))])
        return all(c.loss is not None and math.isfinite(c.loss) for c in calls)
