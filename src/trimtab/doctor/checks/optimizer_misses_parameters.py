"""OPT002: parameters get gradients that no optimizer uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.gradient_reach import hidden_leaves
from trimtab.doctor.probe import Probe


class OptimizerMissesParameters:
    """Parameters get gradients that no optimizer uses.

    ## What it means
    They stay as they were initialised, while the rest learns around them.

    ## How it is checked
    Parameters that require a gradient, get one in a backward pass, are in no optimizer that is known or was seen to
    step, and do not move. Parameters meant to be frozen get no gradient (`requires_grad_(False)`), and are left alone.

    ## What to try
    1. Give the optimizer `model.parameters()`, or add what is missing as a group.
    2. If they are meant to be frozen: `module.requires_grad_(False)`.
    """

    code: ClassVar[str] = "OPT002"
    name: ClassVar[str] = "optimizer-misses-parameters"
    title: ClassVar[str] = "every trainable parameter is in an optimizer"
    causes: ClassVar[tuple[str, ...]] = ("weights-unchanged", "not-learning")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report gradients that no optimizer uses."""
        if not probe.calls:
            yield not_applicable(self, "no step was made")
            return
        reached = {key for c in probe.calls for key in c.reached}
        moved = {key for c in probe.calls for key, (by, _) in c.changes.items() if by > 0}
        free = {n: p for n, p in probe.trainable.items() if id(p) not in probe.held and id(p) not in moved}
        missed = tuple(n for n, p in free.items() if id(p) in reached)
        hidden = hidden_leaves(probe)
        if missed:
            share = sum(free[n].numel() for n in missed) / max(sum(p.numel() for p in probe.model.parameters()), 1)
            yield failed(
                self,
                f"{len(missed)} parameters get gradients and are in no optimizer.",
                f"{listed(missed)}: {share:.1%} of the model, unchanged after {probe.num_steps} steps",
                "optimizer = torch.optim.AdamW(model.parameters(), lr=lr)",
                missed[:8],
                num=float(len(missed)),
            )
        if hidden:
            yield failed(
                self,
                f"{len(hidden)} tensors that require a gradient belong neither to the model nor to an optimizer.",
                f"in the graph of the loss: {listed(tuple(hidden))}",
                "self.blocks = nn.ModuleList(blocks)  # or nn.Parameter(...): a plain list or tensor is not registered",
                tuple(hidden)[:8],
                num=float(len(hidden)),
            )
        if not missed and not hidden:
            num = sum(id(p) in probe.held for p in probe.trainable.values())
            frozen = sum(1 for p in probe.model.parameters() if not p.requires_grad)
            yield passed(self, f"{num} of {len(probe.trainable)} trainable; {frozen} frozen; {len(free)} unused")
