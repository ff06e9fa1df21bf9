"""WIRE023: two runs from the same state, with the same seed and data, differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.observed_step import in_order, may_reorder
from trimtab.doctor.probe import Probe
from trimtab.doctor.repeatability import two_builds_agree

ROUNDING = 1e-5
ORDERED = ", with algorithms of a fixed order; without them the GPU adds in any order"


class NotReproducible:
    """Two runs from the same state, with the same seed and data, differ.

    ## What it means
    Something draws random numbers of its own that no seed reaches, uses the time, or runs an operation whose order is
    not fixed. You cannot reproduce a bug, nor tell an improvement from luck.

    ## How it is checked
    The same few steps twice, from the same weights, moments, batches and seeds of Python, numpy and PyTorch: losses and
    weights must be bit-identical. Where they are not, the training is built twice and tried again. A GPU adds in any
    order: there algorithms of a fixed order are switched on, and differences by rounding alone pass.

    ## What to try
    1. Draw from generators that are seeded: `torch.Generator().manual_seed(seed)`.
    2. `torch.use_deterministic_algorithms(True)` on a GPU.
    """

    code: ClassVar[str] = "WIRE023"
    name: ClassVar[str] = "not-reproducible"
    title: ClassVar[str] = "two runs with one seed agree"
    causes: ClassVar[tuple[str, ...]] = ("resume-differs", "checkpoint-round-trip")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report runs that cannot be repeated."""
        if probe.no_experiments:
            yield not_applicable(self, probe.no_experiments)
            return
        num = probe.affordable(4, least=2, seconds=1.0)
        first, second, same = _twice(probe, num)
        ordered = may_reorder(probe.device) and not same
        if ordered:
            with in_order(probe.device):
                first, second, same = _twice(probe, num)
        nan = any(v is None or v != v for v in first)
        if same or nan:
            yield (
                passed(self, f"{num} steps twice: losses and weights are bit-identical" + (ORDERED if ordered else ""))
                if same
                else not_applicable(self, "the losses are not finite")
            )
            return
        apart = [
            abs(a - b) / max(abs(a), 1e-12)
            for a, b in zip(first, second, strict=True)
            if a is not None and b is not None
        ]
        most = max(apart, default=0.0)
        if may_reorder(probe.device) and most <= ROUNDING:
            yield passed(self, f"{num} steps twice: losses agree to {most:.0e}; not every operation has a fixed order")
            return
        again = probe.again
        if again is not None and two_builds_agree(again, probe.options, probe.doctor_steps, probe.reseed, 3):
            yield passed(self, "two runs of the training, built twice with one seed, agree")
            return
        cause = "two runs from the same state, with the same seed, differ."
        evidence = f"losses {first[-1]:.8g} and {second[-1]:.8g} after {num} steps"
        fix = "noise = torch.randn(size, generator=torch.Generator().manual_seed(seed))"
        tell = failed if most > ROUNDING else warned
        yield tell(self, cause, evidence, fix, ("seed",), difference=most)


def _twice(probe: Probe, num: int) -> tuple[list[float | None], list[float | None], bool]:
    """The losses of the same steps, made twice, and whether these and the weights are bit-identical."""
    runs = []
    for _ in range(2):
        with probe.trial(rates=False):
            calls = probe.run([probe.batch(i) for i in range(num)])
            runs.append(([c.loss for c in calls], [p.detach().clone() for p in probe.model.parameters()]))
    (first, one), (second, other) = runs
    return first, second, first == second and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
