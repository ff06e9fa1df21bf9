"""How far one step moved each parameter, relative to its size, with bounded extra memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.sample import measure
from trimtab.sample.host import upload
from trimtab.sample.meter import Meter

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
        # reshape copies what is not contiguous: a copy would never change, so such a parameter is read anew each time.
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
