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


class Scope:
    """What looks at weights and updates, kept between looks: views of the parameters, and the plans of the launches."""

    def __init__(self, rows: Rows, kernels: str) -> None:
        self._everything = [*rows.params, *rows.others]
        self._addresses = [measure.address(p) for p in self._everything]
        self._weights = [measure.plain(p) for p in self._everything]
        self._meter = Meter({p.device for p in self._everything}, kernels)
        self.rows = rows
        self.probe = UpdateProbe(rows.params, Meter({p.device for p in rows.params}, kernels))

    def fits(self, rows: Rows) -> bool:
        """Whether the views still show the parameters: same rows, and nobody put other storage under them."""
        return rows is self.rows and [measure.address(p) for p in self._everything] == self._addresses

    def weights(self) -> Tensor:
        """The size of every weight."""
        return self._meter.full(self._weights)


class FullLook:
    """Started before the step, finished after it, when what it changed is known."""

    def __init__(self, scope: Scope, grads: Tensor) -> None:
        self._scope, self._grads = scope, grads
        self._weights = scope.weights()
        self._buffers: tuple[BufferRows, Tensor] | None = None
        scope.probe.start()

    def add_buffers(self, rows: BufferRows, table: Tensor) -> None:
        """Add the rows of buffers that went bad."""
        self._buffers = (rows, table)

    def finish(self) -> tuple[Layout, Tensor, dict[str, float | Tensor]]:
        """The layout, the table, and the scalars that sum it up."""
        updates = self._scope.probe.table()
        pieces = {Kind.GRAD: self._grads, Kind.WEIGHT: self._weights, Kind.UPDATE: updates}
        names: BufferRows = ()
        if self._buffers is not None:
            names, pieces[Kind.BUFFER] = self._buffers
        device = self._grads.device
        table = torch.cat([piece.to(device, non_blocking=True) for piece in pieces.values()])
        return self._scope.rows.layout(tuple(pieces), names), table, self._scalars(updates)

    def _scalars(self, updates: Tensor) -> dict[str, float | Tensor]:
        norms, rows = self._weights[:, 0], self._scope.rows
        out: dict[str, float | Tensor] = {"weight_norm": measure.total(norms)}
        if len(rows.groups) > 1:
            for g, members in enumerate(rows.group_indices(norms.device)):
                out[f"weight_norm/{g}"] = measure.total(norms[members])
        mine = measure.total(norms[: len(rows.params)])
        out["update_ratio"] = measure.total(updates[:, 0]) / (mine + 1e-12)
        return out
