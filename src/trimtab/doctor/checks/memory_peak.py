"""WIRE032: the first steps come close to the end of the GPU's memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from trimtab.doctor.checklist import Line, not_applicable, passed, warned
from trimtab.doctor.probe import Probe


class MemoryPeak:
    """The first steps come close to the end of the GPU's memory.

    ## What it means
    A slightly longer batch will not fit.

    ## How it is checked
    CUDA's own peak over the observed steps, against what the device has. On a CPU there is nothing to check.

    ## What to try
    1. A smaller batch with accumulation, checkpointed activations, or mixed precision.
    """

    code: ClassVar[str] = "WIRE032"
    name: ClassVar[str] = "memory-peak"
    title: ClassVar[str] = "memory is not exhausted"
    causes: ClassVar[tuple[str, ...]] = ()

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report a peak near the top."""
        if probe.device.type != "cuda":
            yield not_applicable(self, f"the model is on {probe.device.type}: peaks are counted on CUDA only")
            return
        peak = torch.cuda.max_memory_allocated(probe.device)
        whole = torch.cuda.get_device_properties(probe.device).total_memory
        evidence = f"peak {peak / 2**30:.2f} GiB of {whole / 2**30:.1f} GiB"
        if peak > 0.95 * whole:
            yield warned(
                self, "the first steps fill nearly all of the memory.", evidence, "batch_size //= 2", ("memory",)
            )
        else:
            yield passed(self, evidence, peak=float(peak))
