"""WIRE012: the GradScaler is left out of one of its places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class ScalerOrder:
    """The GradScaler is left out of one of its places.

    ## What it means
    `scaler.scale(loss).backward()`, `scaler.step(optimizer)` and `scaler.update()` belong together. A loss that was not
    scaled gives gradients divided by 65536; a plain `optimizer.step()` makes steps that are 65536 times too long.

    ## How it is checked
    Which losses were scaled, which gradients still are when a step uses them, and what makes the step.

    ## What to try
    1. `scaler.scale(loss).backward(); scaler.unscale_(optimizer); clip; scaler.step(optimizer); scaler.update()`.
    """

    code: ClassVar[str] = "WIRE012"
    name: ClassVar[str] = "scaler-order"
    title: ClassVar[str] = "the GradScaler is used in its order"
    causes: ClassVar[tuple[str, ...]] = (
        "step-exception",
        "learning-rate",
        "not-learning",
        "weights-unchanged",
        "clip-before-unscale",
        "needless-scaler",
        "nonfinite-gradient",
        "nonfinite-weight",
        "nonfinite-loss",
        "gradient-underflow",
    )

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report losses and steps that bypass the scaler."""
        through = probe.events("scaler-step")
        raw = [e for e in probe.events("step") if e.facts["scaled"]]
        backwards = probe.events("backward")
        if probe.failed_as == self.name and probe.failure is not None:
            yield self._wrong(f"the scaler refuses: {probe.failure.text[:160]}", f"at {probe.failure.where}")
        elif raw:
            yield self._wrong(
                "optimizer.step() is called on scaled gradients and bypasses the scaler.",
                f"{len(raw)} of {len(probe.events('step'))} steps used gradients that still hold the scale",
            )
        elif through and backwards and not any(e.facts["scaled"] for e in backwards):
            scale = through[0].facts["scale"]
            yield self._wrong(
                "backward() is called on a loss that was not scaled, and scaler.step() divides by the scale.",
                f"0 of {len(backwards)} losses went through scaler.scale(); the scale is {scale:g}",
            )
        elif len(through) > 1 and not probe.events("update"):
            yield self._wrong("scaler.update() is never called.", f"{len(through)} scaler steps, 0 updates")
        elif through:
            yield passed(self, f"{len(through)} steps through the scaler, scale {through[-1].facts['scale']:g}")
        else:
            yield not_applicable(self, "no GradScaler was used")

    def _wrong(self, cause: str, evidence: str) -> Line:
        fix = "scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"
        return failed(self, cause, evidence, fix, ("scaler",))
