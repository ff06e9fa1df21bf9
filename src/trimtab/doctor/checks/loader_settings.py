"""WIRE031: the loader is not set up to feed a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, not_applicable, passed, warned
from trimtab.doctor.probe import Probe

WAITS = 0.3


class LoaderSettings:
    """The loader is not set up to feed a GPU.

    ## What it means
    Without pinned memory a copy to the GPU cannot run beside the computation; without workers the GPU waits for the
    data.

    ## How it is checked
    The settings of the DataLoader, where the model is on a GPU and its batches are not yet. Workers are missed only
    where reading takes a good part of a step. On a CPU there is nothing to check.

    ## What to try
    1. `DataLoader(..., pin_memory=True, num_workers=4)` and `batch.to(device, non_blocking=True)`.
    """

    code: ClassVar[str] = "WIRE031"
    name: ClassVar[str] = "loader-settings"
    title: ClassVar[str] = "the loader feeds the GPU"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report settings that leave a GPU waiting."""
        loader = probe.target.loader
        if probe.device.type != "cuda":
            yield not_applicable(self, f"the model is on {probe.device.type}: pinning and workers matter on CUDA only")
            return
        if not hasattr(loader, "pin_memory"):
            yield not_applicable(self, f"the loader is a {type(loader).__name__}, which has no such settings")
            return
        if probe.scan.leaves and all(leaf.device.type == "cuda" for leaf in probe.scan.leaves.values()):
            yield not_applicable(self, "batches are on the GPU when they leave the loader")
            return
        evidence = f"pin_memory {loader.pin_memory}, num_workers {getattr(loader, 'num_workers', 0)}"
        if not loader.pin_memory:
            yield warned(
                self, "batches are not in pinned memory.", evidence, "DataLoader(..., pin_memory=True)", ("loader",)
            )
            return
        read_s = probe.scan.seconds / max(probe.scan.num, 1)
        evidence += f", {1000 * read_s:.1f} ms to read a batch, {1000 * probe.step_s:.1f} ms for a step"
        if not getattr(loader, "num_workers", 0) and read_s > WAITS * probe.step_s > 0:
            yield warned(self, "no worker reads ahead.", evidence, "DataLoader(..., num_workers=4)", ("loader",))
        else:
            yield passed(self, evidence)
