"""Where values cross between device and host: a device table becomes a Sample a fixed number of steps later; the only
place where the host may have to wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.core.types import ABSENT, F32, FROZEN, Layout, Sample


@dataclass(slots=True)
class _Delayed:
    step: int
    layout: Layout
    table: F32 | Tensor
    device_names: tuple[str, ...]
    scalars: dict[str, float | Tensor]
    phase: str
    notes: dict[str, tuple[str, ...]]
    frozen: tuple[int, ...]
    event: torch.cuda.Event | None = None
    loose: tuple[tuple[str, ...], Tensor] | None = None


class DelayedSamples:
    """Delivers what was posted at step k when step k+lag is over: by count, never by readiness.

    Every rank then knows the same at the same step. `lag=0` delivers at once.
    """

    def __init__(self, lag: int) -> None:
        self.lag = lag
        self._waiting: deque[_Delayed] = deque()

    def post(
        self,
        step: int,
        layout: Layout,
        table: F32 | Tensor,
        scalars: dict[str, float | Tensor],
        *,
        device_names: tuple[str, ...] = (),
        phase: str = "train",
        notes: dict[str, tuple[str, ...]] | None = None,
        frozen: tuple[int, ...] = (),
    ) -> None:
        """Put a table and its scalars on their way; device values travel together, without stopping the device.

        `device_names` are the names of values that stand behind the table in the same flat buffer; `frozen` are the
        rows whose parameters want no gradient.
        """
        delayed = _Delayed(step, layout, table, device_names, scalars, phase, notes or {}, frozen)
        mine = {k: v for k, v in scalars.items() if v.__class__ is not float and isinstance(v, Tensor) and v.is_cuda}
        if mine or (isinstance(table, Tensor) and table.is_cuda):
            delayed.scalars = {k: v for k, v in scalars.items() if k not in mine}
            values = [v.detach().reshape(1).float() for v in mine.values()]
            if isinstance(table, Tensor) and table.is_cuda:
                delayed.device_names = (*device_names, *mine)
                delayed.table = _sent(torch.cat([table.reshape(-1), *values]) if values else table.reshape(-1))
            else:  # the table is known on the host already: only these numbers are under way
                delayed.loose = (tuple(mine), _sent(torch.cat(values)))
            delayed.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            delayed.event.record()
        self._waiting.append(delayed)

    def due(self, step: int) -> Iterator[Sample]:
        """Everything that is at least `lag` steps old now that `step` is over, oldest first."""
        while self._waiting and self._waiting[0].step + self.lag <= step:
            yield self._open(self._waiting.popleft())

    def drain(self) -> Iterator[Sample]:
        """Everything still under way."""
        while self._waiting:
            yield self._open(self._waiting.popleft())

    def _open(self, delayed: _Delayed) -> Sample:
        if delayed.event is not None:
            delayed.event.synchronize()  # free when the device is no more than `lag` steps behind
        scalars = {k: v if v.__class__ is float else number(v) for k, v in delayed.scalars.items()}
        if delayed.loose is not None:
            names, values = delayed.loose
            scalars |= {k: float(v) for k, v in zip(names, to_host(values), strict=True)}
        table = delayed.table
        if isinstance(table, Tensor):
            table = to_host(table).astype(np.float32, copy=False)
        if delayed.device_names:
            flat = table.reshape(-1)
            size = flat.size - len(delayed.device_names)
            scalars |= {k: float(v) for k, v in zip(delayed.device_names, flat[size:], strict=True)}
            table = flat[:size]
        table = table.reshape(len(delayed.layout.names), len(delayed.layout.columns))
        if delayed.frozen:
            table = _marked(table, delayed.frozen)
        table.setflags(write=False)
        return Sample(
            step=delayed.step,
            layout=delayed.layout,
            table=table,
            scalars=scalars,
            phase=delayed.phase,
            notes=delayed.notes,
        )


def _sent(flat: Tensor) -> Tensor:
    """Put on its way to pinned memory of the host, which does not wait for it."""
    return torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True).copy_(flat, non_blocking=True)


def _marked(table: F32, frozen: tuple[int, ...]) -> F32:
    """The table with FROZEN where a gradient is absent because none is wanted; gradients are its first rows."""
    rows = [i for i in frozen if table[i, 0] == ABSENT]
    if not rows:
        return table
    table = table.copy()
    table[rows, 0] = FROZEN
    return table


def to_host(tensor: Tensor) -> NDArray[Any]:
    """The values as numpy: a view for CPU tensors, a copy that waits for the device otherwise."""
    tensor = tensor.detach()
    if not tensor.is_cpu:
        tensor = tensor.to("cpu")
    if tensor.dtype is torch.bfloat16:  # numpy has no such type
        tensor = tensor.float()
    array: NDArray[Any] = tensor.numpy()
    return array


def number(value: Tensor | float) -> float:
    """A scalar as a Python float; waits for the device if it lives on one."""
    return float(value.detach()) if isinstance(value, Tensor) else float(value)


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device, sent through pinned memory so that the host does not wait for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def to_device(batch: object, device: torch.device) -> Any:
    """The batch with every tensor on the device, without waiting for it; what is there already is not copied.

    Example:
        >>> to_device({"x": torch.ones(1), "name": "a"}, torch.device("cpu"))
        {'x': tensor([1.]), 'name': 'a'}
    """
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(one, device) for key, one in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(one, device) for one in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(one, device) for one in batch)
    return batch
