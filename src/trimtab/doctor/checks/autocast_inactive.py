"""WIRE011: mixed precision was asked for, and the model runs without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from trimtab.doctor.checklist import Line, failed, not_applicable, passed
from trimtab.doctor.observed_step import DTYPES
from trimtab.doctor.probe import Probe


class AutocastInactive:
    """Mixed precision was asked for, and the model runs without it.

    ## What it means
    The forward pass runs in full precision: autocast for another device than the model's, or switched off inside the
    step.

    ## How it is checked
    Every forward pass is asked whether autocast is on, and with which type, at that moment.

    ## What to try
    1. `with torch.autocast(device_type=next(model.parameters()).device.type, dtype=torch.bfloat16):` around the forward
       pass and the loss.
    """

    code: ClassVar[str] = "WIRE011"
    name: ClassVar[str] = "autocast-inactive"
    title: ClassVar[str] = "autocast is active where it was asked for"
    causes: ClassVar[tuple[str, ...]] = ("needless-scaler", "gradient-underflow")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report forward passes in full precision."""
        forwards = [e for e in probe.events("forward") if e.facts["grad"]]
        on = [str(e.facts["autocast"]).removeprefix("torch.") for e in forwards if e.facts["autocast"] is not None]
        wanted = probe.options.amp_dtype
        other = next((w for c in probe.calls for w in c.warnings if "autocast" in w.lower() or "device_type" in w), "")
        if not forwards:
            yield not_applicable(self, "no forward pass was seen")
        elif wanted in DTYPES:
            right = [e for e in forwards if e.facts["autocast"] is DTYPES[wanted]]
            if len(right) == len(forwards):
                yield passed(self, f"{wanted} in {len(right)} of {len(forwards)} forward passes")
            else:
                yield failed(
                    self,
                    f"--amp_dtype {wanted} was asked for, and the step switches autocast off or to another type.",
                    f"{wanted} in {len(right)} of {len(forwards)} forward passes{f'; {on[0]} in others' if on else ''}",
                    f"with torch.autocast(device_type={probe.device.type!r}, dtype=...): loss = ...",
                    ("autocast",),
                )
        elif other and not on:
            yield failed(
                self,
                "the step asks for autocast, and it is not active.",
                other[:160],
                f"with torch.autocast(device_type={probe.device.type!r}, dtype=torch.bfloat16): loss = ...",
                ("autocast",),
            )
        elif not on and (entered := probe.events("autocast")) and not any(e.facts["in_forward"] for e in entered):
            yield failed(
                self,
                "the step asks for autocast, and no forward pass runs under it.",
                f"autocast is entered {len(entered)} times in {len(probe.calls)} calls, never around the model",
                f"with torch.autocast(device_type={probe.device.type!r}, dtype=torch.bfloat16): loss = ...",
                ("autocast",),
            )
        elif on:
            yield passed(self, f"{on[0]} in {len(on)} of {len(forwards)} forward passes")
        else:
            yield not_applicable(self, "no mixed precision was asked for")
