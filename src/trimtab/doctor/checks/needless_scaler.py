"""AMP004: a GradScaler is used without float16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.observed_step import scaler_is_on
from trimtab.doctor.probe import Probe


class NeedlessScaler:
    """A GradScaler is used without float16.

    ## What it means
    bfloat16 and float32 have the range of float32: nothing needs to be scaled. The scaler costs a look at every
    gradient in each step and skips steps for nothing.

    ## How it is checked
    A scaler that is enabled, while no forward pass ran under float16 autocast and no parameter is float16.

    ## What to try
    1. Leave it out, or `GradScaler(enabled=dtype is torch.float16)`.
    """

    code: ClassVar[str] = "AMP004"
    name: ClassVar[str] = "needless-scaler"
    title: ClassVar[str] = "a GradScaler only with float16"
    causes: ClassVar[tuple[str, ...]] = ("gradient-underflow",)

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report scalers that have nothing to scale."""
        scaler = probe.target.scaler
        enabled = scaler is not None and scaler_is_on(scaler)
        used = [e for e in probe.events("scale") if e.facts["enabled"]]
        if not enabled and not used:
            yield not_applicable(self, "there is no GradScaler, or it is disabled")
            return
        half = any(p.dtype is torch.float16 for p in probe.model.parameters())
        forwards = probe.events("forward")
        low = [e for e in forwards if e.facts["autocast"] is torch.float16]
        kinds = sorted({str(e.facts["autocast"]).removeprefix("torch.") for e in forwards})
        if half or low or not forwards:
            yield passed(self, f"float16 in {len(low)} of {len(forwards)} forward passes")
        else:
            yield failed(
                self,
                "a GradScaler is enabled, and nothing is computed in float16.",
                f"autocast: {', '.join(kinds).replace('None', 'off')}; {next(probe.model.parameters()).dtype}",
                "scaler = torch.amp.GradScaler(enabled=dtype is torch.float16)",
                ("scaler",),
            )
