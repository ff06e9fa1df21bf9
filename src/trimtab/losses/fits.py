"""Whether the similarities of all tuples fit into memory, asked before they are allocated."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.losses.cost import TooCostly, nway_cost
from trimtab.losses.machine import free_bytes

SURELY_FITS = 1 << 27
"""Bytes for which nobody is asked what is free."""

__all__ = ["check_it_fits"]


def check_it_fits(xs: Sequence[Tensor], similarity: str) -> None:
    """Raise `TooCostly` where a tensor of all tuples, with what its backward pass keeps, is more than is free."""
    (batch, width), num, device = xs[0].shape, len(xs), xs[0].device
    item = 2 if xs[0].dtype == torch.float64 else 1

    def needed(b: int) -> float:
        return item * nway_cost(num, b, width, similarity=similarity, objective="full", backend="materialize").bytes

    if needed(batch) < SURELY_FITS:
        return
    free = free_bytes(device)
    if needed(batch) > free:
        fits = next((b for b in range(batch - 1, 0, -1) if needed(b) <= free), 0)
        smaller = f" up to B={fits} fits;" if fits else ""
        raise TooCostly(
            f"the similarities of {num} modalities of {batch} samples are {batch}^{num} = {float(batch) ** num:.3g} "
            f"numbers: with what the backward pass keeps about {needed(batch) / 2**30:.3g} GiB, and "
            f"{free / 2**30:.3g} GiB are free on {device}. What to do:{smaller} form='line' gives {batch} x {batch}; "
            f"nway_loss(similarity={similarity!r}) needs no such tensor."
        )
