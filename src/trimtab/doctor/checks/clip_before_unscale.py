"""AMP003: gradients are clipped while they still hold the loss scale."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe


class ClipBeforeUnscale:
    """Gradients are clipped while they still hold the loss scale.

    ## What it means
    A norm that is 65536 times too large is always above the threshold: every gradient is cut to nearly nothing.

    ## How it is checked
    At the moment of clipping, whether the scale is still in the gradients; and whether a step follows that uses what
    was clipped.

    ## What to try
    1. `scaler.unscale_(optimizer)` right before `clip_grad_norm_`.
    """

    code: ClassVar[str] = "AMP003"
    name: ClassVar[str] = "clip-before-unscale"
    title: ClassVar[str] = "clipping comes after unscaling"
    causes: ClassVar[tuple[str, ...]] = ("learning-rate", "not-learning", "weights-unchanged")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report clipping at the wrong place."""
        clips = [e for e in probe.events("clip") if e.facts["num"]]
        bad = [e for e in clips if e.facts["scaled"]]
        if bad:
            yield failed(
                self,
                "gradients are clipped before they are unscaled.",
                f"norm {bad[0].facts['norm']:.3g} against {bad[0].facts['max_norm']:g} {len(bad)} times",
                "scaler.unscale_(optimizer)  # right before clip_grad_norm_",
                ("clip_grad_norm_",),
            )
        elif clips:
            yield passed(self, f"{len(clips)} times, a norm of {clips[0].facts['norm']:.3g}")
        else:
            yield not_applicable(self, "nothing is clipped")
