"""WIRE009: a BatchNorm layer that learns does not follow its batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from torch.nn.modules.batchnorm import _BatchNorm

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.gradient_reach import learns
from trimtab.doctor.probe import Probe


class BatchnormFrozen:
    """A BatchNorm layer that learns does not follow its batches.

    ## What it means
    It is in evaluation mode inside a model that trains, or its momentum is 0: it normalises with statistics that never
    become those of the data.

    ## How it is checked
    The mode of every BatchNorm at the moment it is called, and its momentum. Layers whose weights are frozen may be in
    evaluation mode: that is how a frozen backbone is kept.

    ## What to try
    1. `model.train()` after every validation, and not `.eval()` on parts that learn.
    2. PyTorch's momentum is the share of the new batch: 0.1 is usual (0.9 elsewhere).
    """

    code: ClassVar[str] = "WIRE009"
    name: ClassVar[str] = "batchnorm-frozen"
    title: ClassVar[str] = "BatchNorm uses and follows its batches"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report BatchNorm layers that do not follow their batches."""
        layers = {n: m for n, m in probe.model.named_modules() if isinstance(m, _BatchNorm)}
        if not layers:
            yield not_applicable(self, "there is no BatchNorm")
            return
        modes = {n: probe.modes_of(m) for n, m in layers.items()}
        off = tuple(
            n
            for n, seen in modes.items()
            if seen
            and not any(t for t, grad in seen if grad)
            and learns(probe.model, n)
            and any(grad for _, grad in seen)
        )
        still = tuple(
            n
            for n, m in layers.items()
            if modes[n] and m.momentum == 0 and m.track_running_stats and any(t for t, _ in modes[n])
        )
        if off:
            yield failed(
                self,
                f"{len(off)} of {len(layers)} BatchNorm layers are in evaluation mode in a training step.",
                f"{listed(off)}; their weights are trainable",
                "model.train()  # or freeze their weights too, if they are meant to stay",
                off[:8],
            )
        elif still:
            yield failed(
                self,
                f"{len(still)} BatchNorm layers have a momentum of 0: their running statistics never move.",
                listed(still),
                "nn.BatchNorm2d(channels, momentum=0.1)",
                still[:8],
            )
        else:
            num = sum(any(t for t, _ in seen) for seen in modes.values())
            yield passed(self, f"{num} of {len(layers)} in training mode; the others are frozen or were not called")
