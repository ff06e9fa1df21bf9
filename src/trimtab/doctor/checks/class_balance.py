"""WIRE030: one class makes up nearly all of the data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.probe import Probe


class ClassBalance:
    """One class makes up nearly all of the data.

    ## What it means
    Always guessing that class gives a low loss, and the model may never learn more. It can be meant so (rare events);
    then weigh the classes, and do not look at the accuracy alone.

    ## How it is checked
    The labels of all batches that were seen are counted.

    ## What to try
    1. `CrossEntropyLoss(weight=...)`, or a WeightedRandomSampler.
    2. Was the label column read rightly? Did a filter remove the other classes?
    """

    code: ClassVar[str] = "WIRE030"
    name: ClassVar[str] = "class-balance"
    title: ClassVar[str] = "classes are balanced"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report a class that makes up nearly all labels."""
        facts, scan = probe.facts, probe.scan
        paths = [p for p in probe.roles.targets if scan.leaves[p].counts] if scan.batches else []
        most = facts.num_classes
        if not paths or most is None or facts.kind != "nll" or len(scan.leaves[paths[0]].shape) > 1:
            yield not_applicable(self, "there are no class labels")
            return
        counts = {v: n for v, n in scan.leaves[paths[0]].counts.items() if 0 <= v < most}
        total = sum(counts.values())
        if total < 10 * most:
            yield not_applicable(self, f"{total} labels are too few for {most} classes")
            return
        top, num = max(counts.items(), key=lambda item: item[1])
        shares = ", ".join(f"{v}: {n / total:.0%}" for v, n in sorted(counts.items(), key=lambda item: -item[1])[:5])
        leaf = scan.leaves[paths[0]]
        mixed = 1.0 - sum((n / total) ** 2 for n in counts.values())
        if total >= 64 and mixed > 0.2 and leaf.runs < 0.2 * mixed * (total - 1):
            yield failed(
                self,
                "the data come sorted by class, not shuffled.",
                f"the class changes {leaf.runs} times in {total} samples, not about {mixed * total:.0f} times",
                "DataLoader(dataset, batch_size, shuffle=True)",
                (paths[0],),
            )
        elif num > 0.95 * total and most > 1 and not facts.weighted:
            yield warned(
                self,
                f"{num / total:.1%} of the labels are class {top}.",
                f"{total} labels: {shares}",
                "CrossEntropyLoss(weight=1 / counts)",
                (paths[0],),
                share=num / total,
            )
        else:
            yield passed(self, f"{total} labels: {shares}")
