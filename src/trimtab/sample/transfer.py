"""Where values cross between device and host: a device table becomes a Sample a fixed number of steps later; the only
place where the host may have to wait."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.core.types import ABSENT, F32, FROZEN, Layout, Sample

log = logging.getLogger("trimtab")
_LOST: list[object] = []
"""Memory that copies from a failed device were sent to: PyTorch ends the process where it is given back after that."""
Notes = dict[str, tuple[str, ...]]
Later = Callable[[dict[str, float], Notes], None]
"""Adds facts and notes to those of a step once what it sent to the host has arrived there."""


def is_here(tensor: Tensor) -> bool:
    """Whether the host can read a tensor where it is. Of any other it waits for what it sent, until its step is due."""
    return tensor.is_cpu


class Sent:
    """Values on their way to memory of the host, where later ones will follow: they are taken out before that."""

    __slots__ = ("_event", "_lead", "_values", "factors", "names", "size", "taken")

    def __init__(
        self,
        memory: F32,
        event: torch.cuda.Event | None,
        size: int,
        names: tuple[str, ...],
        lead: NDArray[np.int32] | None = None,
    ) -> None:
        self._event, self._values, self.taken = event, memory, False
        self._lead = lead
        self.size, self.names = size, names  # of the table, and of the values behind it; a nameless one means nothing
        self.factors: F32 | None = None  # for the norms: those of sampled tensors are scaled up to the whole

    def take(self) -> F32:
        """The values; waits for them where they are still under way."""
        if not self.taken:
            if self._event is not None:
                self._event.synchronize()  # free when the device is no more than `lag` steps behind
            self._values, self.taken = self._values.copy(), True
            if self._lead is not None:
                self._lead = self._lead.copy()
        return self._values

    def lead(self) -> NDArray[np.int32] | None:
        """The beginnings of the first two samples of the step's batch, as words of 4 bytes; None where none came."""
        self.take()
        return self._lead

    def split(self) -> tuple[F32, dict[str, float]]:
        """The table, flat, and the values behind it by their names."""
        values = self.take()
        rest: memoryview[float] = values[self.size :].data  # type: ignore[assignment]
        found = dict(zip(self.names, rest, strict=True))
        found.pop("", None)
        table = values[: self.size]
        if self.factors is not None:
            table = table.copy()
            table.reshape(self.factors.size, -1)[:, 0] *= self.factors
        return table, found


class SentParts(Sent):
    """Tables that go to the host one by one, and are put together there.

    The values behind the first are kept, and `more` makes further ones of the tables.
    """

    __slots__ = ("_more", "_parts")

    def __init__(self, parts: Sequence[Sent | Tensor], more: Callable[[list[F32]], dict[str, float]]) -> None:
        self._parts, self._more = parts, more

    def split(self) -> tuple[F32, dict[str, float]]:
        """All tables behind each other, flat, and the values by their names."""
        pairs = [
            (to_host(part).astype(np.float32, copy=False).reshape(-1), {}) if isinstance(part, Tensor) else part.split()
            for part in self._parts
        ]
        tables = [table for table, _ in pairs]
        return np.concatenate(tables), pairs[0][1] | self._more(tables)


_FLOATS = {float}


@dataclass(slots=True)
class _Delayed:
    step: int
    layout: Layout
    table: F32 | Tensor | Sent
    device_names: tuple[str, ...]
    scalars: dict[str, float | Tensor]
    phase: str
    notes: dict[str, tuple[str, ...]]
    frozen: tuple[int, ...]
    later: Later | None = None
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
        table: F32 | Tensor | Sent,
        scalars: dict[str, float | Tensor],
        *,
        device_names: tuple[str, ...] = (),
        phase: str = "train",
        notes: dict[str, tuple[str, ...]] | None = None,
        frozen: tuple[int, ...] = (),
        later: Later | None = None,
        arrival: torch.cuda.Event | None = None,
    ) -> None:
        """Put a table and its scalars on their way; device values travel together, without stopping the device.

        `device_names` are the names of values that stand behind the table in the same flat buffer; `frozen` are the
        rows whose parameters want no gradient. A table that is `Sent` is on its way already. `later` makes facts of
        what probes sent, which is there when `arrival` is.
        """
        delayed = _Delayed(step, layout, table, device_names, scalars, phase, notes or {}, frozen, later, arrival)
        on_device = isinstance(table, Tensor) and _leaves(table)
        mine: dict[str, Tensor] = {}
        if on_device or set(map(type, scalars.values())) != _FLOATS:
            mine = {k: v for k, v in scalars.items() if isinstance(v, Tensor) and _leaves(v)}
        if mine or on_device:
            delayed.scalars = {k: v for k, v in scalars.items() if k not in mine}
            values = [v.detach().reshape(-1).float() for v in mine.values()]
            names = tuple(name for k, v in mine.items() for name in names_of(k, v))
            on_gpu = table.is_cuda if isinstance(table, Tensor) and on_device else values[0].is_cuda
            if isinstance(table, Tensor) and on_device:
                delayed.device_names = (*device_names, *names)
                delayed.table = sent(torch.cat([table.reshape(-1), *values]) if values else table.reshape(-1))
            else:  # the table is known on the host already: only these numbers are under way
                delayed.loose = (names, sent(torch.cat(values)))
            if on_gpu:
                delayed.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                delayed.event.record()
        self._waiting.append(delayed)

    def due(self, step: int) -> Iterator[Sample]:
        """Everything that is at least `lag` steps old now that `step` is over, oldest first."""
        while self._waiting and self._waiting[0].step + self.lag <= step:
            yield self._open(self._waiting.popleft())

    def drain(self) -> Iterator[Sample]:
        """Everything still under way; nothing of it where the device has failed."""
        while self._waiting:
            delayed = self._waiting.popleft()
            try:
                sample = self._open(delayed)
            except RuntimeError as error:  # such as an assertion in a kernel: all that comes after it fails alike
                log.warning("the last %d steps cannot be read from their device (%s)", len(self._waiting) + 1, error)
                _LOST.extend([delayed, *self._waiting])
                self._waiting.clear()
                return
            yield sample

    def _open(self, delayed: _Delayed) -> Sample:
        event: Any = delayed.event
        if event is not None and not event.query():  # it is passed where the device is no more than `lag` steps behind
            event.synchronize()
        scalars: Any = delayed.scalars
        if set(map(type, scalars.values())) != _FLOATS:
            scalars = {k: number(v) for k, v in scalars.items()}
        if delayed.loose is not None:
            names, values = delayed.loose
            scalars |= {k: float(v) for k, v in zip(names, to_host(values), strict=True)}
        table = delayed.table
        if isinstance(table, Sent):
            table, found = table.split()
            scalars |= found
        elif isinstance(table, Tensor):
            table = to_host(table).astype(np.float32, copy=False)
        if delayed.device_names:
            flat = table.reshape(-1)
            size = flat.size - len(delayed.device_names)
            scalars |= {k: float(v) for k, v in zip(delayed.device_names, flat[size:], strict=True)}
            table = flat[:size]
        table = table.reshape(len(delayed.layout.names), len(delayed.layout.columns))
        if delayed.frozen:
            table = _marked(table, delayed.frozen)
        if delayed.later is not None:
            delayed.later(scalars, delayed.notes)
        table.setflags(write=False)
        return Sample(
            step=delayed.step,
            layout=delayed.layout,
            table=table,
            scalars=scalars,
            phase=delayed.phase,
            notes=delayed.notes,
        )


class Replays:
    """What the replays of captured steps left in a ring on the device; taken out whenever the host comes by.

    A replay runs no Python: its step counts itself and writes its values into the ring. Whoever comes by has the ring
    copied, without waiting, and reads the copy that was asked for the last time. Of two copies of the counter, one is
    made before and one after that of the ring: a place that may have been written meanwhile is left out.
    """

    def __init__(self, ring: Tensor, counter: Tensor, size: int) -> None:
        self._ring, self._counter, self._size = ring, counter, size
        self._names: list[tuple[str, ...]] = []
        self._seen = 0
        self._asked: tuple[Tensor, Tensor, Any] | None = None

    def add(self, names: tuple[str, ...]) -> int:
        """One more step was captured: what its values are called. Returns the number that they end with."""
        self._names.append(names)
        return len(self._names) - 1

    def take(self, *, wait: bool = False) -> Iterator[tuple[int, F32, dict[str, float]]]:
        """Every replay that is known by now, oldest first: how many before it were overwritten, its table, its values.

        `wait`: every one there was.
        """
        if self._ring.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        yield from self._answer(wait)
        if wait and self._ring.is_cuda:
            torch.cuda.synchronize(self._ring.device)  # replays may have run on any stream
        if self._asked is None:
            self._ask()
        if wait or not self._ring.is_cuda:
            yield from self._answer(wait)

    def _answer(self, wait: bool) -> Iterator[tuple[int, F32, dict[str, float]]]:
        """What is in the copy that was asked for, once it is here."""
        if self._asked is None:
            return
        counts, ring, event = self._asked
        if event is not None and not event.query():
            if not wait:
                return
            event.synchronize()
        self._asked = None
        before, after = map(int, to_host(counts))
        yield from self._read(before, after, to_host(ring))

    def _ask(self) -> None:
        counts = torch.empty(2, dtype=torch.int64, device="cpu", pin_memory=self._ring.is_cuda)
        counts[:1].copy_(self._counter, non_blocking=True)
        ring = torch.empty(self._ring.shape, dtype=torch.float32, device="cpu", pin_memory=self._ring.is_cuda)
        ring.copy_(self._ring, non_blocking=True)
        counts[1:].copy_(self._counter, non_blocking=True)
        event = None
        if self._ring.is_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._asked = counts, ring, event

    def _read(self, before: int, after: int, ring: F32) -> Iterator[tuple[int, F32, dict[str, float]]]:
        places = len(ring)
        for i in range(max(self._seen, after - places + (after != before)), before):
            row = ring[i % places]
            found = dict(zip(self._names[int(row[-1])], row[self._size :].data, strict=False))
            found.pop("", None)
            missed, self._seen = i - self._seen, i + 1
            yield missed, row[: self._size].copy(), found


def names_of(name: str, value: Tensor) -> tuple[str, ...]:
    """What the numbers of a device value are called on the host: several in one tensor get theirs with a number."""
    return (name,) if value.numel() == 1 else tuple(f"{name}/{i}" for i in range(value.numel()))


def _leaves(tensor: Tensor) -> bool:
    return tensor.is_cuda or not is_here(tensor)


def sent(tensor: Tensor) -> Tensor:
    """A copy on its way to the host, which does not wait for it: to be read, by `to_host`, when its step is due."""
    if not tensor.is_cuda:
        return tensor.detach().clone()
    memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return memory.copy_(tensor.detach(), non_blocking=True)


class Copies:
    """Sends copies to memory of the host that is used again once they were read: getting new memory takes time."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.dtype, torch.Size], list[Tensor]] = {}

    def send(self, flat: Tensor) -> Tensor:
        """A copy on its way; it may be read when its step is due, and is then to be handed back."""
        if not flat.is_cuda:
            return flat.detach().clone()
        free = self._free.get((flat.dtype, flat.shape))
        memory = free.pop() if free else torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        try:
            return memory.copy_(flat, non_blocking=True)
        except RuntimeError:
            _LOST.append(memory)
            raise

    def hand_back(self, copy: Tensor) -> None:
        """It was read."""
        if copy.is_cpu:
            if len(self._free) > MAX_SIZES:  # batches of any size: the usual ones come back
                self._free.clear()
            self._free.setdefault((copy.dtype, copy.shape), []).append(copy)


MAX_SIZES = 16


class Arrivals:
    """Notes on the device's stream that what was sent so far is there once they are passed."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []
        self._stream: Any = None
        self._raw = -1

    def note(self, device: torch.device) -> torch.cuda.Event:
        """After everything that was launched so far."""
        # The stream that is current now is asked for by its number, which is quick.
        raw = torch._C._cuda_getCurrentRawStream(device.index or 0)
        if raw != self._raw:
            self._raw, self._stream = raw, torch.cuda.current_stream(device)
        event = self._free.pop() if self._free else torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def hand_back(self, event: torch.cuda.Event) -> None:
        """It was waited for."""
        self._free.append(event)


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
