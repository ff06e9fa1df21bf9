"""ACT003: the output is the same for every sample."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.probe import Probe
from trimtab.sample.transfer import number

SAME = 1e-6


class CollapsedOutput:
    """The output is the same for every sample.

    ## What it means
    The output does not depend on the input: dead units, a pooling over the batch, a head that sees only a constant.

    ## How it is checked
    After some steps, so that a head that begins at zero has moved: the output of a batch of different samples must
    differ from row to row.

    ## What to try
    1. Follow one batch through the layers: where do its rows become equal?
    """

    code: ClassVar[str] = "ACT003"
    name: ClassVar[str] = "collapsed-output"
    title: ClassVar[str] = "the output tells samples apart"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "targets-do-not-predict")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report outputs that do not depend on the sample."""
        why = probe.no_experiments
        seen = [] if why else [c.output for c in probe.varied if c.output is not None and c.failure is None]
        size = probe.scan.size or 0
        rows = [o for o in seen[-3:] if o.dim() >= 1 and o.shape[0] == size >= 4 and o.is_floating_point()]
        if not rows:
            yield not_applicable(self, why or "no output with one row per sample was seen")
            return
        flat = [o.reshape(o.shape[0], -1).double() for o in rows]
        spread = min(number((f - f.mean(0)).abs().max()) / max(number(f.abs().max()), 1e-30) for f in flat)
        most = max(number((f - f.mean(0)).abs().max()) / max(number(f.abs().max()), 1e-30) for f in flat)
        if most < SAME:
            yield failed(
                self,
                "the output is the same for every sample.",
                f"within a batch of {size} it differs by {most:.1e} of its size after {len(seen)} steps",
                "# follow one batch through the layers: where do its rows become equal?",
                ("output",),
                spread=spread,
            )
        else:
            yield passed(self, f"it differs by {most:.2g} of its size within a batch of {size}")
