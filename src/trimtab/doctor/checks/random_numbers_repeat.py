"""WIRE043: each step begins with the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from trimtab.doctor.checklist import Line, not_applicable, passed, warned
from trimtab.doctor.probe import Probe


class RandomNumbersRepeat:
    """Each step begins with the same random numbers.

    ## What it means
    A seed that is set inside the loop makes every step draw the same Dropout masks, the same noise and the same order:
    what should vary is a constant.

    ## How it is checked
    A step on one batch, begun with two different seeds. Where the generator ends in the same state both times, the
    step has set the seed in between.

    ## What to try
    1. `torch.manual_seed(seed)` once, before the loop.
    2. For repeatable augmentation: a `torch.Generator` of its own.
    """

    code: ClassVar[str] = "WIRE043"
    name: ClassVar[str] = "random-numbers-repeat"
    title: ClassVar[str] = "random numbers differ from step to step"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report a seed that is set in every step."""
        why = probe.no_experiments
        if why:
            yield not_applicable(self, why)
            return
        ends = []
        with probe.trial(rates=False):
            for seed in (11, 12):
                calls = probe.run([probe.batch(0)], seeds=[seed])
                ends.append(torch.get_rng_state())
        if calls[-1].failure is None and torch.equal(*ends):
            yield warned(
                self,
                "the seed is set again inside the step: every step draws the same random numbers.",
                "begun with two different seeds, the generator ends a step in the same state",
                "torch.manual_seed(0)  # once, before the loop",
                ("torch.manual_seed",),
            )
        else:
            yield passed(self, "begun with two seeds, a step ends with two states of the generator")
