"""GRAD007: clipping leaves next to nothing of the gradient."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import ClassVar

from trimtab.advice.engine import fair_limit
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.loss_graph import FAR_FROM_CHANCE, chance_of, first_loss
from trimtab.doctor.probe import Probe

MOST = 3_000.0


class ChronicClipping:
    """Clipping leaves next to nothing of the gradient.

    ## What it means
    A threshold thousands of times below the usual norm is a hidden factor on the learning rate, and with Adam the
    gradient is far below its epsilon.

    ## How it is checked
    The norm at each clipping against its threshold.

    ## What to try
    1. Clip at about twice the usual norm; `trimtab tune clip RUN` suggests a limit.
    """

    code: ClassVar[str] = "GRAD007"
    name: ClassVar[str] = "chronic-clipping"
    title: ClassVar[str] = "clipping leaves most of the gradient"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "learning-rate", "weights-unchanged", "update-ratio")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report thresholds far below the norm."""
        clips = [e for e in probe.events("clip") if e.facts["num"] and not e.facts["scaled"]]
        if not clips:
            yield not_applicable(self, "nothing is clipped by its norm")
            return
        ratios = sorted(e.facts["norm"] / max(e.facts["max_norm"], 1e-30) for e in clips)
        typical, usual = ratios[len(ratios) // 2], median(e.facts["norm"] for e in clips)
        evidence = f"norm {clips[0].facts['norm']:.3g} against {clips[0].facts['max_norm']:g}, {len(clips)} times"
        if ratios[0] > MOST and not _first_loss_is_far(probe):
            yield failed(
                self,
                f"clipping leaves one part in {typical:.0f} of the gradient.",
                evidence,
                f"clip_grad_norm_(model.parameters(), {fair_limit(usual)})  # twice the usual norm",
                ("clip_grad_norm_",),
                ratio=typical,
            )
        else:
            yield passed(self, evidence)


def _first_loss_is_far(probe: Probe) -> bool:
    """Whether the gradient is large because the first loss is: then clipping helps."""
    first, chance = first_loss(probe.facts), chance_of(probe.facts)
    return first is not None and chance is not None and first > FAR_FROM_CHANCE * chance
