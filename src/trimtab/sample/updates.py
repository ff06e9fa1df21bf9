"""How far one step moved each parameter, relative to its size, with bounded extra memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.sample import measure
from trimtab.sample.host import upload
from trimtab.sample.meter import Meter

MAX_COPIED = 1 << 24
"""Elements copied at most. Above that each tensor is judged by an equal share of its leading elements."""


class UpdateProbe:
    """Copies weights before a step and compares them after it."""

    def __init__(self, params: Sequence[Tensor], meter: Meter) -> None:
        total = sum(p.numel() for p in params)
        share = min(1.0, MAX_COPIED / max(total, 1))
        self._params, self._meter = params, meter
        self._sampled = share < 1.0
        self._counts = [min(p.numel(), max(1, int(p.numel() * share))) for p in params]
        self._before = [part.clone() for part in self._parts()]

    def _parts(self) -> list[Tensor]:
        flats = [measure.plain(p).reshape(-1) for p in self._params]
        return [f[:n] for f, n in zip(flats, self._counts, strict=True)]

    def table(self) -> Tensor:
        """The size of what the step changed; the norm of a sampled tensor is scaled up to the whole."""
        table = self._meter.full(torch._foreach_sub(self._parts(), self._before))
        if self._sampled:
            scale = [(p.numel() / max(n, 1)) ** 0.5 for p, n in zip(self._params, self._counts, strict=True)]
            table[:, 0] *= upload(np.array(scale, np.float32), table.device)
        return table
