"""One thorough look at a step: when it deserves one, all columns of the gradients, how far it moved each parameter,
buffers gone bad."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.types import Kind, Layout
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.meter import Meter
from trimtab.sample.rows import Rows
from trimtab.sample.transfer import upload

BufferRows = tuple[tuple[str, int], ...]


class Scope:
    """What looks at weights and updates, kept between looks: views of the parameters, and the plans of the launches."""

    def __init__(self, rows: Rows, kernels: str) -> None:
        self._everything = [*rows.params, *rows.others]
        self._addresses = [measure.address(p) for p in self._everything]
        self._weights = [measure.plain(p) for p in self._everything]
        self._meter = Meter({p.device for p in self._everything}, kernels)
        self.rows = rows
        rows.layout(FullLook.KINDS)  # made once, before the first step
        self.probe = UpdateProbe(rows.params, Meter({p.device for p in rows.params}, kernels))

    def fits(self, rows: Rows) -> bool:
        """Whether the views still show the parameters: same rows, and nobody put other storage under them."""
        return rows is self.rows and [measure.address(p) for p in self._everything] == self._addresses

    def weights(self) -> Tensor:
        """The size of every weight."""
        return self._meter.full(self._weights)


class FullLook:
    """Started before the step, finished after it, when what it changed is known."""

    KINDS = (Kind.GRAD, Kind.WEIGHT, Kind.UPDATE)

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
        pieces = dict(zip(self.KINDS, (self._grads, self._weights, updates), strict=True))
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


MAX_COPIED = 1 << 20
"""Elements copied of a whole model. Above that each tensor is judged by an equal share of its leading elements."""
MIN_COPIED = 1 << 12
"""Elements of each tensor that are copied in any case: fewer would say little about it."""


class UpdateProbe:
    """Copies weights before a step and compares them after it. The views it reads them through are kept."""

    def __init__(self, params: Sequence[Tensor], meter: Meter) -> None:
        flats = [measure.plain(p).reshape(-1) for p in params]
        share = min(1.0, MAX_COPIED / max(sum(f.numel() for f in flats), 1))
        counts = [min(f.numel(), max(MIN_COPIED, int(f.numel() * share))) for f in flats]
        self._parts = [f[:n] for f, n in zip(flats, counts, strict=True)]
        # reshape copies what is not contiguous: a copy would never change, so such a parameter is read again each time.
        at = [measure.address(p) for p in params]
        self._copied = [i for i, (f, a) in enumerate(zip(flats, at, strict=True)) if f.data_ptr() != a]
        self._params, self._counts, self._meter = params, counts, meter
        ratio = [(f.numel() / max(n, 1)) ** 0.5 for f, n in zip(flats, counts, strict=True)]
        self._scale = upload(np.array(ratio, np.float32), params[0].device) if share < 1.0 else None
        self._before: tuple[Tensor, ...] = ()

    def start(self) -> None:
        """Before the step: copy."""
        self._before = torch._foreach_mul(self._now(), 1.0)

    def table(self) -> Tensor:
        """After it: the size of what it changed; the norm of a sampled tensor is scaled up to the whole."""
        table = self._meter.full(torch._foreach_sub(self._now(), self._before))
        self._before = ()
        if self._scale is not None:
            table[:, 0] *= self._scale
        return table

    def _now(self) -> list[Tensor]:
        for i in self._copied:
            self._parts[i] = measure.plain(self._params[i]).reshape(-1)[: self._counts[i]]
        return self._parts


RATIO = 8.0
MIN_HISTORY = 16


class Suspicion:
    """A short memory of the gradient norm: non-finite, or far above all of it, looks wrong."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=64)

    def looks_wrong(self, norm: float, loss: float | None) -> bool:
        """Judge one step."""
        if not norm < math.inf or (loss is not None and not -math.inf < loss < math.inf):
            return True
        known = self._norms
        return len(known) >= MIN_HISTORY and norm > RATIO * known[-1] and norm > RATIO * max(known)

    def ceiling(self, loss: float | None) -> float:
        """Below this no norm looks wrong beside this loss."""
        if loss is not None and not -math.inf < loss < math.inf:
            return -math.inf
        return RATIO * self._norms[-1] if len(self._norms) >= MIN_HISTORY else math.inf

    def note(self, norm: float) -> None:
        """Remember the norm of a step that was judged."""
        if norm < math.inf:
            self._norms.append(norm)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._norms = deque(state["norms"], maxlen=64)
