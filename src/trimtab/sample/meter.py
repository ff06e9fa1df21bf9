"""Measures the gradients of one lane on a device: by the Triton kernels where they run, else by torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from trimtab.core.types import FULL_COLUMNS, NORM_COLUMNS, Column
from trimtab.sample import measure
from trimtab.sample.measure import Limits, Measured

log = logging.getLogger("trimtab")


@cache
def _triton() -> Any:
    """The Triton measurement; None where it is not installed or does not import."""
    if find_spec("triton") is None:
        return None
    try:
        from trimtab.sample import measure_triton
    except Exception as error:  # a broken install must not cost more than speed
        log.warning("triton is installed but cannot be used (%s); measuring with torch", error)
        return None
    return measure_triton


@cache
def _say(what: str, device: str) -> None:
    log.info("gradients on %s are measured with %s", device, what)


class Meter:
    """Chooses once, says so once in the log, and keeps the plan of the launches between steps."""

    def __init__(self, devices: set[torch.device], kernels: str) -> None:
        one_cuda = len(devices) == 1 and next(iter(devices)).type == "cuda"
        self._triton = _triton() if kernels != "torch" and (one_cuda or kernels == "triton") else None
        self._plan: Any = None
        self._present: list[int] | None = None
        for device in devices:
            _say("triton" if self._triton is not None else "torch", device.type)

    @property
    def columns(self) -> tuple[Column, ...]:
        """What every step measures."""
        return NORM_COLUMNS if self._triton is None else FULL_COLUMNS

    def measure(
        self,
        plain: Sequence[Tensor],
        present: list[int] | None,
        num_rows: int,
        limits: Limits,
        scale: Tensor | None = None,
    ) -> Measured:
        """Table and decisions, on the device, without waiting for it."""
        if self._triton is None or not plain:
            return measure.on_device(plain, present, num_rows, limits, scale)
        flat = [t if t.is_contiguous() else self._triton.flat_values(t) for t in plain]
        addresses = self._plan.addresses(flat) if self._plan is not None and present == self._present else None
        if addresses is None:
            self._plan, self._present = self._triton.Plan(flat, present, num_rows), present
            addresses = self._plan.addresses(flat)
        measured: Measured = self._plan.run(flat, addresses, limits, scale)
        return measured


def full(tensors: Sequence[Tensor], kernels: str) -> Tensor:
    """All columns of a list of plain tensors that is measured now and then (weights, updates)."""
    devices = {t.device for t in tensors}
    meter = Meter(devices, kernels) if tensors else None
    if meter is None or meter.columns != FULL_COLUMNS:
        return measure.sizes(tensors)
    return meter.measure(tensors, None, len(tensors), Limits()).table
