"""WGT001: weights or buffers hold NaN or Inf before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.core.window import listed
from trimtab.doctor.checklist import Line, failed, passed
from trimtab.doctor.probe import Probe


class NonfiniteWeight:
    """Weights or buffers hold NaN or Inf before the first step.

    ## What it means
    A damaged checkpoint, memory that was never initialised (`torch.empty`), or an initialisation that divides by zero.

    ## How it is checked
    Every parameter and buffer, before anything is run. Masks of 0 and -inf are allowed.

    ## What to try
    1. Initialise the tensor, or load a checkpoint that is sound (`trimtab checkpoint verify`).
    """

    code: ClassVar[str] = "WGT001"
    name: ClassVar[str] = "nonfinite-weight"
    title: ClassVar[str] = "weights and buffers are finite"
    causes: ClassVar[tuple[str, ...]] = ("*",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report NaN and Inf in parameters and buffers."""
        bad = probe.nonfinite_at_start
        if bad:
            yield failed(
                self,
                f"{len(bad)} parameters or buffers hold NaN or Inf before the first step.",
                listed(bad),
                "nn.init.xavier_uniform_(layer.weight)  # or load a sound checkpoint",
                bad[:8],
            )
        else:
            num = sum(1 for _ in probe.model.parameters()) + sum(1 for _ in probe.model.buffers())
            yield passed(self, f"{num} tensors")
