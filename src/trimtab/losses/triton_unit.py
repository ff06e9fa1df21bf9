"""Rows made comparable on a GPU: what takes a dozen passes over the inputs with plain operations is one of a kernel.

With two modalities of 32,768 rows those passes were a tenth of the loss.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

log = logging.getLogger("trimtab")

WIDEST = 1 << 14
"""Entries of a row that one program holds at most."""
APART = 1 << 20
"""Entries of a modality from which on it is read where it is; smaller ones are first put together, in one launch."""

__all__ = ["supports", "unit_rows"]


def supports(xs: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether `unit_rows` can do it: matrices with float32 sums on a card, outside of a compiler."""
    from trimtab.losses.triton_stream import available

    if xs[0].dim() != 2 or xs[0].shape[1] > WIDEST or dtype != torch.float32 or torch.compiler.is_compiling():
        return False
    return available(xs[0].device) and _runs(xs[0].device)


@cache
def _runs(device: torch.device) -> bool:
    """Tried once: launching takes a C compiler, which not every machine has, and plain operations do as well."""
    try:
        unit_rows([torch.ones(1, 16, device=device, dtype=torch.float32)], "l2", None)
    except Exception as error:
        log.info("no Triton kernels for rows on %s (%s: %s)", device, type(error).__name__, error)
        return False
    return True


def unit_rows(xs: Sequence[Tensor], how: str, present: Tensor | None) -> tuple[Tensor, ...]:
    """The modalities in float32 with rows of length 1 (l2) or root mean square 1 (rms), absent and zero rows zero."""
    rows: tuple[Tensor, ...] = _Unit.apply(how, present, *xs)  # type: ignore[no-untyped-call]
    return rows


class _Unit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: str, present: Tensor | None, *xs: Tensor) -> tuple[Tensor, ...]:
        from trimtab.losses import triton_unit_kernels

        n, (batch, width) = len(xs), xs[0].shape
        lengths, tops = (torch.empty(n, batch, dtype=torch.float32, device=xs[0].device) for _ in range(2))
        keep = None if present is None else present.to(torch.uint8).contiguous()
        ctx.squared = float(width) if how == "rms" else 1.0
        if batch * width < APART:
            rows = torch.stack([x.float() for x in xs])
            calls = [(rows.view(-1, width), 0)]
        else:
            rows = torch.empty(n, batch, width, dtype=torch.float32, device=xs[0].device)
            calls = [(x if x.stride(1) == 1 else x.contiguous(), m * batch) for m, x in enumerate(xs)]
        for x, first in calls:
            grid, blocks = _launch(*x.shape)
            triton_unit_kernels.unit_rows[grid](
                x, keep, rows, lengths, tops,
                len(x), x.stride(0), width, math.sqrt(ctx.squared), first, MASKED=keep is not None, **blocks,
            )  # fmt: skip
        ctx.dtypes = [x.dtype for x in xs]
        ctx.save_for_backward(rows, lengths, tops)
        return rows.unbind(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        from trimtab.losses import triton_unit_kernels

        rows, lengths, tops = ctx.saved_tensors
        n, batch, width = rows.shape
        if batch * width < APART:
            together = torch.stack(grads).view(-1, width)
            out = torch.empty_like(rows)
            calls = [(together, out, 0)]
            found = list(out.unbind(0))
        else:
            found = [torch.empty(batch, width, dtype=ctx.dtypes[m], device=rows.device) for m in range(n)]
            calls = [(g if g.stride(1) == 1 else g.contiguous(), found[m], m * batch) for m, g in enumerate(grads)]
        for g, out, first in calls:
            grid, blocks = _launch(*g.shape)
            triton_unit_kernels.unit_grads[grid](
                g, rows, lengths, tops, out, len(g), g.stride(0), width, ctx.squared, first, **blocks
            )
        wanted = zip(found, ctx.dtypes, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(g.to(dtype) if need else None for g, dtype, need in wanted)


def _launch(count: int, width: int) -> tuple[tuple[int], dict[str, int]]:
    """The grid, and the rows and entries of a program."""
    wide = max(16, 1 << (width - 1).bit_length())
    tall = max(1, min(16, 2048 // wide))
    return (-(-count // tall),), {"BLOCK_ROWS": tall, "BLOCK_D": wide, "num_warps": 4 if wide <= 4096 else 8}
