"""One thorough look at a step: when it deserves one, all columns of the gradients, how far it moved each parameter,
buffers gone bad."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trimtab.core.types import F32, FULL_COLUMNS, Kind, Layout
from trimtab.sample.measure import reference as measure
from trimtab.sample.measure.meter import Meter
from trimtab.sample.rows import Rows
from trimtab.sample.transfer import Sent, SentParts, is_here, upload

BufferRows = tuple[tuple[str, int], ...]
KINDS = (Kind.GRAD, Kind.WEIGHT, Kind.UPDATE)
"""Whose rows a full scan has, in this order; those of buffers come behind them."""


class Scope:
    """What looks at weights and updates, kept between looks: views of the parameters, and the plans of the launches."""

    def __init__(self, rows: Rows, kernels: str) -> None:
        self._everything = [*rows.params, *rows.others]
        self._sharded = any(hasattr(p, "to_local") for p in self._everything)
        self._addresses = self._where()
        self._weights = [measure.plain(p) for p in self._everything]
        self._meter = Meter({p.device for p in self._everything}, kernels)
        self.rows = rows
        rows.layout(KINDS)  # made once, before the first step
        self.probe = UpdateProbe(rows.params, Meter({p.device for p in rows.params}, kernels))
        self._sends = self._meter.can_send(self._weights)
        self.whole: Callable[[Tensor], Tensor] | None = None
        if (shards := rows.shards) is not None:  # all processes put together what they measured of their parts
            few, many = range(len(rows.params)), range(len(self._everything))
            which = torch.tensor([*few, *many, *few], dtype=torch.int64, device=rows.params[0].device)
            self.whole = lambda table: shards.whole(table, which)

    @property
    def sends(self) -> bool:
        """Whether the kernels can send everything to the host; else torch measures it."""
        return self._sends and self.probe.sends

    def _where(self) -> list[int]:
        if self._sharded:
            return [measure.address(p) for p in self._everything]
        return list(map(Tensor.data_ptr, self._everything))

    def fits(self, rows: Rows) -> bool:
        """Whether the views still show the parameters: same rows, and nobody put other storage under them."""
        return rows is self.rows and self._where() == self._addresses

    def weights(self) -> Tensor:
        """The size of every weight."""
        return self._meter.full(self._weights)

    def send_weights(self) -> Sent | Tensor:
        """The same on its way to the host, where the weights are copied as well to be compared after the step."""
        sent = self._meter.send(self._weights, self.probe.copy)
        if sent is None:
            self._sends = False
            self.probe.copy()
            return self.weights()
        return sent

    def values_of(self, tables: list[F32]) -> dict[str, float]:
        """The scalars that sum up the tables of gradients, weights and updates, in this order."""
        rows, num = self.rows, len(self.rows.params)
        weights, updates = (table.reshape(-1, len(FULL_COLUMNS))[:, 0].astype(np.float64) for table in tables[1:3])
        out = {"weight_norm": _total(weights)}
        if len(rows.groups) > 1:
            out |= {f"weight_norm/{g}": _total(weights[members]) for g, members in enumerate(rows.groups)}
        out["update_ratio"] = _total(updates) / (_total(weights[:num]) + 1e-12)
        return out


def _total(norms: NDArray[np.float64]) -> float:
    return math.sqrt(float(np.dot(norms, norms)))


class FullLook:
    """Started before the step, finished after it, when what it changed is known."""

    def __init__(self, scope: Scope, grads: Tensor | Sent) -> None:
        self._scope, self._grads = scope, grads
        self._buffers: tuple[BufferRows, Tensor] | None = None
        if isinstance(grads, Tensor):
            self._weights: Tensor | Sent = scope.weights()
            scope.probe.start()
        else:
            self._weights = scope.send_weights()

    def add_buffers(self, rows: BufferRows, table: Tensor) -> None:
        """Add the rows of buffers that went bad."""
        self._buffers = (rows, table)

    def finish(self) -> tuple[Layout, Tensor | Sent, dict[str, float | Tensor]]:
        """The layout, the table, and the scalars that sum it up; what is sent brings them along."""
        scope, grads, weights = self._scope, self._grads, self._weights
        names, buffers = self._buffers or ((), None)
        kinds = KINDS if buffers is None else (*KINDS, Kind.BUFFER)
        layout = scope.rows.layout(kinds, names)
        last = [] if buffers is None else [buffers]
        if not isinstance(grads, Tensor) or not isinstance(weights, Tensor):
            return layout, SentParts([grads, weights, scope.probe.send(), *last], scope.values_of), {}
        updates = scope.probe.table()
        # To the device of the weights: where there is no gradient at all their table is on the host.
        device = weights.device
        table = torch.cat([piece.to(device, non_blocking=True) for piece in (grads, weights, updates, *last)])
        if scope.whole is not None:
            num = len(grads) + len(weights) + len(updates)
            table[:num] = scope.whole(table[:num])
            weights, updates = table[len(grads) : num - len(updates)], table[num - len(updates) : num]
        return layout, table, self._scalars(weights, updates)

    def _scalars(self, weights: Tensor, updates: Tensor) -> dict[str, float | Tensor]:
        norms, rows = weights[:, 0], self._scope.rows
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
        self._ratio = np.array(ratio, np.float32)
        self._scale = upload(self._ratio, params[0].device) if share < 1.0 else None
        self._before: tuple[Tensor, ...] = ()
        # In memory that is kept: what kernels compare can be recorded, and the host need not find pages each time.
        self._copies: list[Tensor] = []
        self._changes: list[Tensor] = []
        self.sends = not self._copied and meter.can_send(self._parts)
        self._on_host = all(map(is_here, self._parts))
        if self._on_host:
            self._copies, self._changes = _beside(self._parts), _beside(self._parts)

    def start(self) -> None:
        """Before the step: copy."""
        if self._on_host:
            torch._foreach_copy_(self._copies, self._now())
        else:
            self._before = torch._foreach_mul(self._now(), 1.0)

    def table(self) -> Tensor:
        """After it: the size of what it changed; the norm of a sampled tensor is scaled up to the whole."""
        if self._on_host:
            torch._foreach_copy_(self._changes, self._now())
            torch._foreach_sub_(self._changes, self._copies)
            table = self._meter.full(self._changes)
        else:
            table = self._meter.full(torch._foreach_sub(self._now(), self._before))
            self._before = ()
        if self._scale is not None:
            table[:, 0] *= self._scale
        return table

    def copy(self) -> None:
        """`start` for `send`, into memory that is kept."""
        if not self._copies:
            self._copies, self._changes = _beside(self._parts), _beside(self._parts)
        torch._foreach_copy_(self._copies, self._parts)

    def _compare(self) -> None:
        torch._foreach_copy_(self._changes, self._parts)
        torch._foreach_sub_(self._changes, self._copies)

    def send(self) -> Sent | Tensor:
        """`table` on its way to the host, after `copy`."""
        sent = self._meter.send(self._changes, self._compare)
        if sent is None:
            self._before, self.sends = tuple(self._copies), False
            return self.table()
        sent.factors = None if self._scale is None else self._ratio
        return sent

    def _now(self) -> list[Tensor]:
        for i in self._copied:
            self._parts[i] = measure.plain(self._params[i]).reshape(-1)[: self._counts[i]]
        return self._parts


ALIGNED = 64
"""Elements from one tensor's place to the next are a multiple of this: the kernels then read all of them alike."""


def _beside(parts: Sequence[Tensor]) -> list[Tensor]:
    """Room for each of these, in one piece of memory per type."""
    sizes = [-(-part.numel() // ALIGNED) * ALIGNED for part in parts]
    whole = {dtype: sum(s for s, p in zip(sizes, parts, strict=True) if p.dtype is dtype) for dtype in _types(parts)}
    flats = {dtype: torch.zeros(num, dtype=dtype, device=parts[0].device) for dtype, num in whole.items()}
    out = []
    for size, part in zip(sizes, parts, strict=True):
        out.append(flats[part.dtype][: part.numel()])
        flats[part.dtype] = flats[part.dtype][size:]
    return out


def _types(parts: Sequence[Tensor]) -> set[torch.dtype]:
    return {part.dtype for part in parts}


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
