"""One thorough look at a step: all columns of the gradients, the size of weights and updates, buffers gone bad."""

from __future__ import annotations

import torch
from torch import Tensor

from trimtab.core.types import Kind, Layout
from trimtab.sample import measure
from trimtab.sample.meter import Meter
from trimtab.sample.rows import Rows
from trimtab.sample.updates import UpdateProbe

BufferRows = tuple[tuple[str, int], ...]


class LookMeters:
    """The meters of weights and updates, kept between looks with the plans of their launches."""

    def __init__(self, rows: Rows, kernels: str) -> None:
        everything = (*rows.params, *rows.others)
        self.weights = Meter({p.device for p in everything}, kernels)
        self.updates = Meter({p.device for p in rows.params}, kernels)


class FullLook:
    """Started before the step, finished after it, when what it changed is known."""

    def __init__(self, rows: Rows, grads: Tensor, meters: LookMeters) -> None:
        self._rows = rows
        self._grads = grads
        self._weights = meters.weights.full([measure.plain(p) for p in (*rows.params, *rows.others)])
        self._probe = UpdateProbe(rows.params, meters.updates)
        self._buffers: tuple[BufferRows, Tensor] | None = None

    def add_buffers(self, rows: BufferRows, table: Tensor) -> None:
        """Add the rows of buffers that went bad."""
        self._buffers = (rows, table)

    def finish(self) -> tuple[Layout, Tensor, dict[str, float | Tensor]]:
        """The layout, the table, and the scalars that sum it up."""
        updates = self._probe.table()
        pieces = {Kind.GRAD: self._grads, Kind.WEIGHT: self._weights, Kind.UPDATE: updates}
        names: BufferRows = ()
        if self._buffers is not None:
            names, pieces[Kind.BUFFER] = self._buffers
        device = self._grads.device
        table = torch.cat([piece.to(device, non_blocking=True) for piece in pieces.values()])
        return self._rows.layout(tuple(pieces), names), table, self._scalars(updates)

    def _scalars(self, updates: Tensor) -> dict[str, float | Tensor]:
        norms = self._weights[:, 0]
        whole = measure.total(norms)
        out: dict[str, float | Tensor] = {"weight_norm": whole}
        if len(self._rows.groups) > 1:
            for g, members in enumerate(self._rows.group_indices(norms.device)):
                out[f"weight_norm/{g}"] = measure.total(norms[members])
        mine = measure.total(norms[: len(self._rows.params)])
        out["update_ratio"] = measure.total(updates[:, 0]) / (mine + 1e-12)
        return out
