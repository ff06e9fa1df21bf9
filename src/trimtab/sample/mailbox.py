"""Device table -> host Sample, a fixed number of steps later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimtab.core.types import F32, Layout, Sample
from trimtab.sample.host import number, to_host


@dataclass(slots=True)
class _Letter:
    step: int
    layout: Layout
    table: F32 | Tensor
    scalars: dict[str, float | Tensor]
    phase: str
    event: torch.cuda.Event | None = None


class Mailbox:
    """Delivers what was posted at step k when step k+lag is over: by count, never by readiness.

    Every rank then knows the same at the same step. `lag=0` delivers at once.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._letters: deque[_Letter] = deque()

    def post(
        self,
        step: int,
        layout: Layout,
        table: F32 | Tensor,
        scalars: dict[str, float | Tensor],
        *,
        phase: str = "train",
    ) -> None:
        """Put a table and its scalars on their way; device values travel without stopping the device."""
        letter = _Letter(step, layout, table, scalars, phase)
        if isinstance(table, Tensor) and table.is_cuda:
            letter.table = _pinned(table)
            letter.scalars = {k: _pinned(v) if isinstance(v, Tensor) and v.is_cuda else v for k, v in scalars.items()}
            letter.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            letter.event.record()
        self._letters.append(letter)

    def due(self, step: int) -> Iterator[Sample]:
        """Everything that is at least `lag` steps old now that `step` is over, oldest first."""
        while self._letters and self._letters[0].step + self.lag <= step:
            yield self._open(self._letters.popleft())

    def drain(self) -> Iterator[Sample]:
        """Everything still under way."""
        while self._letters:
            yield self._open(self._letters.popleft())

    def _open(self, letter: _Letter) -> Sample:
        if letter.event is not None:
            letter.event.synchronize()  # free when the device is no more than `lag` steps behind
        table = letter.table
        if isinstance(table, Tensor):
            table = to_host(table).astype(np.float32, copy=False)
        table.setflags(write=False)
        return Sample(
            step=letter.step,
            layout=letter.layout,
            table=table,
            scalars={k: number(v) for k, v in letter.scalars.items()},
            phase=letter.phase,
        )


def _pinned(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor.detach(), non_blocking=True)
