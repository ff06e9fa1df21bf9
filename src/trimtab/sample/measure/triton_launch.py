"""The one-pass measurement on CUDA: which tensors go into which launch, and where their addresses come from.

Everything that differs between two steps of one plan lies in pinned memory of the host, which the kernels read: the
launches of a step are always the same, and after a few steps they are replayed as one CUDA graph. The kernels write
their results into pinned memory, too. Each step has such memory to itself until its values were taken out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from trimtab.core.types import ABSENT, F32, Column
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.graphs import recorded
from trimtab.sample.measure.kernels import (
    advance,
    chunk_stats,
    global_stats,
    input_stats,
    products,
    row_stats,
    scale_chunks,
    send,
)
from trimtab.sample.measure.reference import DOTS, GLOBALS, KINDS, NUM_OTHERS, Limits, Measured, Outgoing
from trimtab.sample.probes.batch import LARGE, SLICE, WORDS
from trimtab.sample.transfer import Replays, Sent, upload

NUM_COLUMNS = len(Column)
NUM_RING = 4
NUM_SHARES, NUM_DOTS = 64, len(DOTS)
MAX_VECTOR = 512
MAX_READ = 2048
"""Chunks up to which the kernels read addresses from the host's memory; of more, each would wait a microsecond."""
GRAPH_AFTER = 3 * NUM_RING
"""Runs of one plan before its launches are recorded: plans that change all the time are not worth it."""
NUM_RARE = 2
"""Places for plans that run now and then: the values of one look are taken out before the next but one."""
NUM_SPARES, MAX_CAPTURES = 2, 64
RING_BYTES = 1 << 20
MAX_PLACES = 256
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TUNED = {torch.float32: (1024, 32, 8), torch.bfloat16: (512, 64, 4), torch.float16: (512, 64, 4)}
"""Elements per block, blocks per chunk, warps: the fastest found on an H200 (benchmarks/results/)."""
_IN_GRAPHS: list[object] = []
"""Memory that graphs captured by others read and write: a graph may be replayed after its guard is gone."""
_IN_FLIGHT: list[_Slot] = []
"""Pinned memory that nobody needs any more but a device may still write to; looked through for each new plan."""


@dataclass(slots=True)
class _Batch:
    """Tensors of one type and alignment: one launch."""

    members: list[int]
    dtype: torch.dtype
    aligned: bool
    first_address: int
    chunk_row: Tensor
    first_chunk: Tensor
    numel: Tensor
    table_row: Tensor
    parts: Tensor
    place: int


class _Way(NamedTuple):
    """What the launches of a step depend on beside its tensors."""

    clip: bool
    reject: bool
    scaled: bool
    input: bool
    dots: bool
    in_place: bool
    target: str  # "": the values stay on the device; "host": they are sent; "ring": they are kept for who comes by
    before: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class _Slot:
    """The memory of one step under way: what its kernels are told, and what they answer."""

    told: Tensor
    limits: Tensor
    answer: Tensor
    event: Any
    addresses: NDArray[np.int64]
    scale_at: Tensor
    input: Tensor
    vectors: Tensor
    others: Tensor
    values: F32
    lead: Tensor
    words: NDArray[np.int32]
    known: list[int] = field(default_factory=list)
    num_others: int = 0
    set_limits: Limits | None = None
    sent: Sent | None = None
    graphs: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def free(self) -> None:
        """Wait until nothing is under way here: usually long done."""
        if self.sent is not None:
            self.sent.take()
            self.sent = None
        elif self.event is not None:
            self.event.synchronize()


class Plan:
    """How to measure one list of tensors. Built once; every step only their addresses are looked at again.

    `prelude`: launch this before anything is measured. It is recorded with the rest, so it must read and write the same
    memory every time. Such a plan runs rarely and is never captured by others: its launches are recorded at once.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        present: Sequence[int] | None,
        num_rows: int,
        prelude: Callable[[], None] | None = None,
    ) -> None:
        self._prelude = prelude
        self._device = tensors[0].device
        self._on_gpu = self._device.type == "cuda"
        self._num_rows = num_rows
        self._rows = list(range(num_rows)) if present is None else list(present)
        self._aligned = [t.data_ptr() % 16 == 0 for t in tensors]
        self._all_aligned = all(self._aligned)
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        self._others: list[int] = []
        for i, t in enumerate(tensors):
            if t.dtype not in _DTYPES:
                self._others.append(i)
            else:
                kinds.setdefault((t.dtype, self._aligned[i]), []).append(i)
        # Each part of what the kernels are told begins at 16 bytes, so that one compiled kernel fits all.
        *firsts, self._num_told = accumulate((_even(len(m)) for m in kinds.values()), initial=0)
        self._batches: list[_Batch] = []
        place = 0
        for ((dtype, aligned), members), first in zip(kinds.items(), firsts, strict=True):
            self._batches.append(self._batch(tensors, members, dtype, aligned, place, first))
            place += len(members)
        self._num_squares = place + len(self._others)
        self._num_values = num_rows * NUM_COLUMNS + len(GLOBALS)
        self._num_behind = self._num_values + 2 + NUM_DOTS
        self._width = self._num_behind + NUM_OTHERS
        self._blank = None if present is None else self._blank_table()
        self._squares = torch.zeros(max(self._num_squares, 1), dtype=torch.float64, device=self._device)
        num_chunks = sum(b.chunk_row.numel() for b in self._batches)
        self._near = (
            torch.zeros(self._num_told, dtype=torch.int64, device=self._device) if num_chunks > MAX_READ else None
        )
        self.known: list[int] = []  # the addresses that were measured last
        _IN_FLIGHT[:] = [slot for slot in _IN_FLIGHT if slot.event is not None and not slot.event.query()]
        self._slots = [self._slot() for _ in range(NUM_RING if prelude is None else NUM_RARE)]
        # For steps that others capture: each keeps its own for good.
        self._num_spares = NUM_SPARES if prelude is None else 0
        self._spares = [self._slot()] if self._num_spares else []
        self._graph_after = GRAPH_AFTER if prelude is None else 0
        self._turn, self._runs = 0, 0
        self.replays: Replays | None = None
        self._own: Measured | None = None
        self._graphs_work = self._on_gpu and not self._others
        self._before: Callable[[], None] | None = None
        self._stream: Any = None
        self._raw = -1

    def _batch(
        self,
        tensors: Sequence[Tensor],
        members: list[int],
        dtype: torch.dtype,
        aligned: bool,
        place: int,
        first_address: int,
    ) -> _Batch:
        block, iters, _ = _TUNED[dtype]
        numel = np.array([tensors[i].numel() for i in members], np.int64)
        chunks = -(-numel // (block * iters))
        first = np.concatenate([[0], np.cumsum(chunks)[:-1]])

        def put(array: NDArray[Any]) -> Tensor:
            return upload(array, self._device)

        return _Batch(
            members=members,
            dtype=dtype,
            aligned=aligned,
            first_address=first_address,
            chunk_row=put(np.repeat(np.arange(len(members), dtype=np.int32), chunks)),
            first_chunk=put(first.astype(np.int32)),
            numel=put(numel),
            table_row=put(np.array([self._rows[i] for i in members], np.int32)),
            parts=torch.empty(7 * int(chunks.sum()), dtype=torch.float64, device=self._device),
            place=place,
        )

    def _slot(self) -> _Slot:
        def pinned(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device="cpu", pin_memory=self._on_gpu)

        num = self._num_told
        told, answer = pinned(num + 2 + 6 + 6 + NUM_OTHERS, torch.int64), pinned(self._width, torch.float32)
        lead = pinned(2 * WORDS if self._prelude is None else 0, torch.int32)
        return _Slot(
            told=told,
            limits=pinned(4, torch.float64),
            answer=answer,
            values=answer.numpy(),
            event=torch.cuda.Event() if self._on_gpu else None,  # type: ignore[no-untyped-call]
            addresses=told.numpy(),
            scale_at=told[num : num + 2],
            input=told[num + 2 : num + 8],
            vectors=told[num + 8 : num + 14],
            others=told[num + 14 :],
            lead=lead,
            words=lead.numpy(),
        )

    def _blank_table(self) -> Tensor:
        blank = np.zeros((self._num_rows, NUM_COLUMNS), np.float32)
        blank[:, 0] = ABSENT
        return upload(blank.reshape(-1), self._device)

    def takes(self, addresses: list[int]) -> bool:
        """Whether tensors at these addresses can be measured by this plan: they must be aligned as its own were."""
        if self._all_aligned:
            return not reduce(or_, addresses, 0) & 15
        return [a % 16 == 0 for a in addresses] == self._aligned

    def run(
        self,
        tensors: Sequence[Tensor],
        addresses: list[int],
        limits: Limits,
        scale: Tensor | None = None,
        outgoing: Outgoing | None = None,
        in_place: bool = False,
        capturing: bool = False,
        before: Callable[[], None] | None = None,
    ) -> Measured:
        """Measure, without waiting for the device.

        With `outgoing` the values are sent to the host as well, those of `outgoing` behind them; the result is then
        valid until the next run. `in_place` scales the tensors by the clip coefficient; at 1 nothing is touched.
        `capturing` into a CUDA graph, the replays leave their values in a ring on the device. `before` is launched
        first, and recorded with the rest: as long as it is the same object it must read and write the same memory.
        """
        if before is not self._before:
            self._before = before
            for one in self._slots:  # what was recorded with another is not wanted any more
                one.graphs = {way: replay for way, replay in one.graphs.items() if way[-1] is None}
        # Memory that a captured launch reads and writes is used again at every replay: nothing else may use it.
        slot = self._spares.pop() if capturing else self._slots[self._turn]
        if not capturing and (slot.sent is None or not slot.sent.taken):
            slot.free()
        if addresses != slot.known or limits is not slot.set_limits or scale is not None:
            self._tell(slot, addresses, limits, scale)
        measured = self._values() if outgoing is None else self._own or self._own_values()
        way = (
            limits.max_norm is not None,
            limits.reject_nonfinite,
            scale is not None,
            outgoing is not None and outgoing.input is not None,
            outgoing is not None and outgoing.vectors is not None,
            in_place,
            "" if outgoing is None else "ring" if capturing else "host",
            before,
        )
        if outgoing is not None:
            self._tell_more(slot, outgoing, capturing)
        if capturing:
            _IN_GRAPHS.append((self, slot))
            self._launch(slot, tensors, measured, _Way(*way))
            measured.sent, self.known = None, []
            return measured
        self._start(slot, tensors, measured, way)
        self.known = addresses
        self._turn = (self._turn + 1) % len(self._slots)
        if outgoing is not None:
            memory = slot.values[: self._num_behind + len(outgoing.names)]
            lead = slot.words if outgoing.input is not None else None
            size, names = self._num_rows * NUM_COLUMNS, outgoing.all_names()
            measured.sent = slot.sent = Sent(memory, slot.event, size, names, lead)
            while len(self._spares) < self._num_spares:
                self._spares.append(self._slot())
        return measured

    def _values(self) -> Measured:
        flat = torch.empty(self._num_values, device=self._device, dtype=torch.float32)
        if self._blank is not None:
            flat[: self._blank.numel()] = self._blank
        return Measured(flat, self._num_rows, NUM_COLUMNS)

    def _own_values(self) -> Measured:
        if self._own is None:
            self._own = self._values()
            table = self._num_rows * NUM_COLUMNS
            self._own.scalars = {name: self._own.flat[table + i] for i, name in enumerate(GLOBALS)}
            self._found = torch.zeros(1 + NUM_SHARES + NUM_DOTS, dtype=torch.float32, device=self._device)
            places = max(min(MAX_PLACES, RING_BYTES // (4 * self._width)), 4) if self._num_spares else 1
            self._ring = torch.zeros(places, self._width, dtype=torch.float32, device=self._device)
            self._counter = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._numbers = torch.arange(MAX_CAPTURES, dtype=torch.float32, device=self._device)
        return self._own

    @property
    def can_capture(self) -> bool:
        """Whether everything a captured step needs is there: it cannot be made while others capture."""
        return self._own is not None and len(self._spares) > 0

    # -- what the kernels are told ---------------------------------------------------------------------------------

    def _tell(self, slot: _Slot, addresses: list[int], limits: Limits, scale: Tensor | None) -> None:
        if addresses != slot.known:
            for batch in self._batches:
                first, members = batch.first_address, batch.members
                mine = addresses if len(members) == len(addresses) else [addresses[i] for i in members]
                slot.addresses[first : first + len(members)] = mine
            slot.known = addresses
        if scale is not None:
            slot.addresses[self._num_told] = scale.data_ptr()
        if limits is not slot.set_limits:
            slot.set_limits = limits
            slot.limits.numpy()[:3] = (
                limits.max_norm or 0.0,
                np.inf if limits.reject_above is None else limits.reject_above,
                -1.0 if limits.clip_above is None else limits.clip_above,
            )

    def _tell_more(self, slot: _Slot, outgoing: Outgoing, capturing: bool) -> None:
        """Tell what else to send."""
        told, first = slot.addresses, self._num_told + 2
        batch, vectors = outgoing.input, outgoing.vectors
        if batch is not None:
            at, kind = batch.data_ptr(), KINDS.get(batch.dtype, 0)
            told[first : first + 5] = (at, batch.numel(), kind, *outgoing.words)
        if vectors is not None and (one := vectors[0]) is not None:
            places = [0 if v is None else v.data_ptr() for v in vectors]
            told[first + 6 : first + 12] = (*places, one.numel(), KINDS[one.dtype])
        first, num = first + 12, len(outgoing.addresses)
        told[first : first + num] = outgoing.addresses
        if num < slot.num_others:
            told[first + num : first + slot.num_others] = 0
        slot.num_others = num
        if capturing:  # the last one says which of several captured steps it was
            if self.replays is None:
                self.replays = Replays(self._ring, self._counter, self._num_rows * NUM_COLUMNS)
            number = self.replays.add(outgoing.all_names())
            told[first + NUM_OTHERS - 1] = self._numbers[number].data_ptr()

    # -- the launches ----------------------------------------------------------------------------------------------

    def _start(self, slot: _Slot, tensors: Sequence[Tensor], measured: Measured, key: tuple[Any, ...]) -> None:
        """Launch, by a graph where there is one, and note when it will be done."""
        replay = slot.graphs.get(key)
        if replay is not None:
            replay()
        else:
            way = _Way(*key)
            self._launch(slot, tensors, measured, way)
            self._runs += 1
            if self._graphs_work and self._runs > self._graph_after and way.target:
                slot.graphs[key] = recorded(self._device, lambda: self._launch(slot, tensors, measured, way))
                self._graphs_work = slot.graphs[key] is not None
        if self._on_gpu:
            self._note_end(slot)

    def _note_end(self, slot: _Slot) -> None:
        # The stream that is current now is asked for by its number, which is quick.
        raw = torch._C._cuda_getCurrentRawStream(self._device.index or 0)
        if raw != self._raw:
            self._raw, self._stream = raw, torch.cuda.current_stream(self._device)
        slot.event.record(self._stream)

    def _launch(self, slot: _Slot, tensors: Sequence[Tensor], measured: Measured, way: _Way) -> None:
        flat = measured.flat
        if way.before is not None:
            way.before()
        if self._prelude is not None:
            self._prelude()
        if self._near is not None:
            self._near.copy_(slot.told[: self._num_told], non_blocking=True)
        for batch in self._batches:
            self._launch_batch(slot, batch, flat, way.scaled)
        for k, i in enumerate(self._others):
            row = measure.reference_row(tensors[i])
            measured.table[self._rows[i]] = row
            self._squares[self._num_squares - len(self._others) + k] = row[0].double() ** 2
        global_stats[(1,)](
            self._squares,
            flat[self._num_rows * NUM_COLUMNS :],
            self._num_squares,
            slot.limits,
            BLOCK=1024,
            CLIP=way.clip,
            REJECT=way.reject,
        )
        if way.in_place:
            self._launch_scale(slot, tensors, measured.scalar("clip_coef"))
        if way.input:
            input_stats[(NUM_SHARES,)](
                slot.input, self._found, slot.lead, LEAD=SLICE, LARGE=LARGE, BLOCK=1024, WORDS=WORDS
            )
        if way.dots:
            products[(1,)](slot.vectors, self._found[1 + NUM_SHARES :], SIZE=MAX_VECTOR)
        if way.target:
            ring = way.target == "ring"
            send[(-(-self._num_values // 1024),)](
                flat,
                self._num_values,
                self._found,
                slot.others,
                self._ring if ring else slot.answer,
                self._counter,
                self._width,
                len(self._ring),
                BLOCK=1024,
                NUM_SHARES=NUM_SHARES,
                NUM_DOTS=NUM_DOTS,
                NUM_OTHERS=NUM_OTHERS,
                INPUT=way.input,
                DOTS=way.dots,
                RING=ring,
            )
            if ring:
                advance[(1,)](self._counter)

    def _addresses(self, slot: _Slot, batch: _Batch) -> Tensor:
        there = slot.told if self._near is None else self._near
        return there[batch.first_address : batch.first_address + len(batch.members)]

    def _launch_batch(self, slot: _Slot, batch: _Batch, flat: Tensor, scaled: bool) -> None:
        block, iters, warps = _TUNED[batch.dtype]
        num_chunks = batch.chunk_row.numel()
        if num_chunks:
            chunk_stats[(num_chunks,)](
                self._addresses(slot, batch),
                batch.chunk_row,
                batch.first_chunk,
                batch.numel,
                batch.parts,
                num_chunks,
                BLOCK=block,
                ITERS=iters,
                DTYPE=_DTYPES[batch.dtype],
                ALIGNED=batch.aligned,
                STRIP=min(128, block),
                num_warps=warps,
            )
        row_stats[(len(batch.members),)](
            batch.parts,
            batch.first_chunk,
            batch.numel,
            batch.table_row,
            slot.scale_at,
            flat,
            self._squares,
            num_chunks,
            batch.place,
            CHUNK=block * iters,
            BLOCK=128,
            SCALED=scaled,
            num_warps=4,
        )

    def scale(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply the tensors measured last by a device scalar, in place; at 1 nothing is read or written."""
        slot = self._slots[(self._turn - 1) % len(self._slots)]
        self._launch_scale(slot, tensors, factor)
        if self._on_gpu:
            self._note_end(slot)

    def _launch_scale(self, slot: _Slot, tensors: Sequence[Tensor], factor: Tensor) -> None:
        for batch in self._batches:
            block, iters, warps = _TUNED[batch.dtype]
            if batch.chunk_row.numel():
                scale_chunks[(batch.chunk_row.numel(),)](
                    self._addresses(slot, batch),
                    batch.chunk_row,
                    batch.first_chunk,
                    batch.numel,
                    factor,
                    BLOCK=block,
                    ITERS=iters,
                    DTYPE=_DTYPES[batch.dtype],
                    ALIGNED=batch.aligned,
                    num_warps=warps,
                )
        for i in self._others:
            tensors[i].mul_(factor.to(tensors[i].dtype))

    def __del__(self) -> None:
        # PyTorch does not know that kernels write to this memory: it must not be given to others before they are done.
        # Nor may CUDA be asked now whether they are: Python may delete this while somebody captures a graph.
        _IN_FLIGHT.extend(getattr(self, "_slots", ()))


def _even(number: int) -> int:
    return number + number % 2


def is_readable(tensor: Tensor) -> bool:
    """Whether the kernels can read this tensor where it is, from its address on."""
    return tensor.dtype in _DTYPES and tensor.is_contiguous()


def flat_values(tensor: Tensor) -> Tensor:
    """A tensor whose memory can be read from its address on: dense in any order, else a dense copy."""
    return tensor if tensor.is_contiguous() or _dense(tensor) else tensor.contiguous()


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
