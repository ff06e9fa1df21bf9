"""Measures the gradients of one lane on a device: by the Triton kernels where they run, else by torch."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from trimtab.core.types import FULL_COLUMNS, NORM_COLUMNS, Column
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.reference import Limits, Measured, Outgoing
from trimtab.sample.transfer import Replays, Sent

log = logging.getLogger("trimtab")
NO_LIMITS = Limits()


@cache
def _triton() -> Any:
    """The Triton measurement; None where it is not installed or does not import."""
    if find_spec("triton") is None:
        return None
    try:
        from trimtab.sample.measure import triton_launch as measure_triton
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
        # Elsewhere the kernels run only in Triton's interpreter, and only for who asks for it.
        interpreted = kernels == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        self._triton: Any = _triton() if kernels != "torch" and (one_cuda or interpreted) else None
        self._plan: Any = None
        self._sending: Any = None  # the plan of `send`
        self._present: list[int] | None = None
        self._sizes: list[int] | None = None
        self._copied = False
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
        *,
        vary: bool = False,
        outgoing: Outgoing | None = None,
        in_place: bool = False,
        capturing: bool = False,
        before: Callable[[], None] | None = None,
    ) -> Measured:
        """Table and decisions, on the device, without waiting for it.

        `vary`: the sizes may differ from step to step. `outgoing`: send the result to the host at once, and this along
        with it. `in_place`: scale by the clip coefficient what was measured. `capturing`: a CUDA graph is being
        captured. What of that was possible, the result says. `before` is launched first (see `Plan.run`).
        """
        if self._triton is not None and plain:
            try:
                return self._by_triton(
                    plain, present, num_rows, limits, scale, vary, outgoing, in_place, capturing, before
                )
            except Exception as error:  # no compiler, an unknown card: slower is better than unguarded
                log.warning("the Triton kernels cannot be used here (%s); measuring with torch", error)
                self._triton = self._plan = None
        if before is not None:
            before()
        return measure.on_device(plain, present, num_rows, limits, scale)

    def _by_triton(
        self,
        plain: Sequence[Tensor],
        present: list[int] | None,
        num_rows: int,
        limits: Limits,
        scale: Tensor | None,
        vary: bool,
        outgoing: Outgoing | None,
        in_place: bool,
        capturing: bool,
        before: Callable[[], None] | None,
    ) -> Measured:
        tensors = plain
        plan = self._plan
        addresses = list(map(Tensor.data_ptr, tensors))
        known = plan is not None and addresses == plan.known
        if not known:
            # New tensors: only now look whether their memory can be read straight through.
            self._copied = not all(map(Tensor.is_contiguous, tensors))
            if self._copied:
                tensors = [self._triton.flat_values(t) for t in plain]
                self._copied = any(a is not b for a, b in zip(tensors, plain, strict=True))
                addresses = list(map(Tensor.data_ptr, tensors))
                known = plan is not None and addresses == plan.known
        sizes = list(map(Tensor.numel, tensors)) if vary else self._sizes
        if plan is None or present != self._present or sizes != self._sizes or not (known or plan.takes(addresses)):
            if capturing:  # what a plan is made of cannot be sent to the device now
                return measure.on_device(plain, present, num_rows, limits, scale)
            plan = self._plan = self._triton.Plan(tensors, present, num_rows)
            self._present, self._sizes = present, sizes
        if capturing and not plan.can_capture:
            return measure.on_device(plain, present, num_rows, limits, scale)
        in_place = in_place and self.can_scale
        measured: Measured = plan.run(tensors, addresses, limits, scale, outgoing, in_place, capturing, before)
        measured.scaled = in_place
        return measured

    @property
    def can_scale(self) -> bool:
        """Whether what was measured last can be scaled where it is: it was no copy."""
        return self._plan is not None and not self._copied

    @property
    def replays(self) -> Replays | None:
        """Where the replays of steps captured so far leave their values; None while none was."""
        return None if self._plan is None else self._plan.replays

    def full(self, tensors: Sequence[Tensor]) -> Tensor:
        """All columns of plain tensors that are measured now and then (weights, updates), where they come cheaply."""
        measured = self.measure(tensors, None, len(tensors), Limits()) if self._triton is not None else None
        if measured is None or measured.num_columns != len(FULL_COLUMNS):
            return measure.sizes(tensors)
        return measured.table

    def can_send(self, tensors: Sequence[Tensor]) -> bool:
        """Whether `send` can measure these: dense, and of types that the kernels read."""
        return self._triton is not None and len(tensors) > 0 and all(map(self._triton.is_readable, tensors))

    def send(self, tensors: Sequence[Tensor], prelude: Callable[[], None]) -> Sent | None:
        """What `full` measures, on its way to the host; `prelude` is launched before. None where that does not work.

        Of one meter always the same tensors, in memory that stays theirs, and the same `prelude`.
        """
        try:
            if self._sending is None:
                self._sending = self._triton.Plan(tensors, None, len(tensors), prelude)
            addresses = self._sending.known or list(map(Tensor.data_ptr, tensors))
            sent: Sent | None = self._sending.run(tensors, addresses, NO_LIMITS, outgoing=Outgoing()).sent
            return sent
        except Exception as error:  # as in `measure`
            log.warning("the Triton kernels cannot be used here (%s); measuring with torch", error)
            self._triton = self._plan = self._sending = None
            return None
