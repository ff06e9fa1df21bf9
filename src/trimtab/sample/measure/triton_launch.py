"""The one-pass measurement on CUDA: which tensors go into which launch, and where their addresses come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from trimtab.core.types import ABSENT, Column
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.kernels import chunk_stats, global_stats, row_stats, scale_chunks
from trimtab.sample.measure.reference import GLOBALS, Limits, Measured
from trimtab.sample.transfer import upload

NUM_COLUMNS = len(Column)
NUM_RING = 4
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_TUNED = {torch.float32: (1024, 32, 8), torch.bfloat16: (512, 64, 4), torch.float16: (512, 64, 4)}
"""Elements per block, blocks per chunk, warps: the fastest found on an H200 (benchmarks/results/)."""


@dataclass(slots=True)
class _Batch:
    """Tensors of one type and alignment: one launch."""

    members: list[int]
    dtype: torch.dtype
    aligned: bool
    addresses: Tensor
    chunk_row: Tensor
    first_chunk: Tensor
    numel: Tensor
    table_row: Tensor
    parts: Tensor
    place: int


class Plan:
    """How to measure one list of tensors. Built once; every step only their addresses are looked at again."""

    def __init__(self, tensors: Sequence[Tensor], present: Sequence[int] | None, num_rows: int) -> None:
        self._device = tensors[0].device
        self._num_rows = num_rows
        self._rows = list(range(num_rows)) if present is None else list(present)
        self._aligned = [t.data_ptr() % 16 == 0 for t in tensors]
        kinds: dict[tuple[torch.dtype, bool], list[int]] = {}
        self._others: list[int] = []
        for i, t in enumerate(tensors):
            if t.dtype not in _DTYPES:
                self._others.append(i)
            else:
                kinds.setdefault((t.dtype, self._aligned[i]), []).append(i)
        self._batches: list[_Batch] = []
        place = 0
        for (dtype, aligned), members in kinds.items():
            self._batches.append(self._batch(tensors, members, dtype, aligned, place))
            place += len(members)
        self._num_squares = place + len(self._others)
        self._blank = None if present is None else self._blank_table()
        self._squares = torch.zeros(max(self._num_squares, 1), dtype=torch.float64, device=self._device)
        self._known: list[int] = []
        self._ring = [self._pinned() for _ in range(NUM_RING + 1)]
        self._turn = 0

    def _batch(
        self, tensors: Sequence[Tensor], members: list[int], dtype: torch.dtype, aligned: bool, place: int
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
            addresses=put(np.zeros(len(members), np.int64)),
            chunk_row=put(np.repeat(np.arange(len(members), dtype=np.int32), chunks)),
            first_chunk=put(first.astype(np.int32)),
            numel=put(numel),
            table_row=put(np.array([self._rows[i] for i in members], np.int32)),
            parts=torch.empty(7 * int(chunks.sum()), dtype=torch.float64, device=self._device),
            place=place,
        )

    def _pinned(self) -> tuple[list[Tensor], Any]:
        on_gpu = self._device.type == "cuda"
        slots = [torch.empty(len(b.members), dtype=torch.int64, device="cpu", pin_memory=on_gpu) for b in self._batches]
        return slots, torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def _blank_table(self) -> Tensor:
        blank = np.zeros((self._num_rows, NUM_COLUMNS), np.float32)
        blank[:, 0] = ABSENT
        return upload(blank.reshape(-1), self._device)

    def takes(self, addresses: list[int]) -> bool:
        """Whether tensors at these addresses can be measured by this plan: they must be aligned as its own were."""
        return addresses == self._known or [a % 16 == 0 for a in addresses] == self._aligned

    def run(
        self,
        tensors: Sequence[Tensor],
        addresses: list[int],
        limits: Limits,
        scale: Tensor | None = None,
    ) -> Measured:
        """Measure, without waiting for the device."""
        flat = torch.empty(self._num_rows * NUM_COLUMNS + len(GLOBALS), device=self._device, dtype=torch.float32)
        if self._blank is not None:
            flat[: self._blank.numel()] = self._blank
        measured = Measured(flat, self._num_rows, NUM_COLUMNS)
        self._send(addresses)
        for batch in self._batches:
            self._launch(batch, measured, scale)
        for k, i in enumerate(self._others):
            row = measure.reference_row(tensors[i])
            measured.table[self._rows[i]] = row
            self._squares[self._num_squares - len(self._others) + k] = row[0].double() ** 2
        global_stats[(1,)](
            self._squares,
            flat[self._num_rows * NUM_COLUMNS :],
            self._num_squares,
            float(limits.max_norm or 0.0),
            float("inf") if limits.reject_above is None else float(limits.reject_above),
            BLOCK=1024,
            CLIP=limits.max_norm is not None,
            REJECT=limits.reject_nonfinite,
        )
        return measured

    def _launch(self, batch: _Batch, measured: Measured, scale: Tensor | None) -> None:
        block, iters, warps = _TUNED[batch.dtype]
        num_chunks = batch.chunk_row.numel()
        if num_chunks:
            chunk_stats[(num_chunks,)](
                batch.addresses,
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
            self._squares if scale is None else scale,
            measured.flat,
            self._squares,
            num_chunks,
            batch.place,
            CHUNK=block * iters,
            BLOCK=128,
            SCALED=scale is not None,
            num_warps=4,
        )

    def scale(self, tensors: Sequence[Tensor], factor: Tensor) -> None:
        """Multiply the tensors measured last by a device scalar, in place; at 1 nothing is read or written."""
        for batch in self._batches:
            block, iters, warps = _TUNED[batch.dtype]
            if batch.chunk_row.numel():
                scale_chunks[(batch.chunk_row.numel(),)](
                    batch.addresses,
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

    @property
    def known(self) -> list[int]:
        """The addresses that were measured last."""
        return self._known

    def _send(self, addresses: list[int]) -> None:
        """Send addresses that changed, through pinned memory that no copy in flight still reads."""
        if addresses == self._known:
            return
        capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        # A captured copy reads its host memory again at every replay: it gets a slot that nothing else writes to.
        slots, event = self._ring[NUM_RING if capturing else self._turn]
        if event is not None and not capturing:
            event.synchronize()  # four changes ago: long done
        for slot, batch in zip(slots, self._batches, strict=True):
            slot.numpy()[:] = [addresses[i] for i in batch.members]
            batch.addresses.copy_(slot, non_blocking=True)
        self._known = [] if capturing else addresses
        if not capturing:
            if event is not None:
                event.record()
            self._turn = (self._turn + 1) % NUM_RING


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
