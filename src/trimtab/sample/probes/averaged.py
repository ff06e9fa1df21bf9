"""The averaged copy of a model: whether it still follows, and whether it is still sound."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from trimtab.sample.probes.ledger import Part
from trimtab.torchutil.averaged_weights import averaged_weights

BUDGET = 1 << 12
NUM_TENSORS = 16


class AveragedProbe:
    """Counts the steps since the averaged weights last moved, and looks for NaN and Inf in them."""

    def __init__(self, ema: object) -> None:
        self._ema = ema
        found = [(n, t) for n, t in averaged_weights(ema) if t.is_floating_point()]
        # All of it moves or none: a few tensors tell, and on a device each costs a launch.
        self._part = Part(found[:: max(len(found) // NUM_TENSORS, 1)], BUDGET)
        self._last = np.zeros(self._part.size, np.float32)
        self._now = np.zeros(self._part.size, np.float32)
        self._still = self._moves = 0
        if self._part.size and self._part.on_host:
            self._part.read(self._last)

    def look(self) -> tuple[dict[str, float | Tensor], dict[str, tuple[str, ...]]]:
        """Once a step."""
        if not self._part.size:
            return {}, {}
        if not self._part.on_host:
            waiting = self._is_waiting()
            return ({} if waiting else {"ema_sum": self._part.sum()}), {}
        self._part.read(self._now)
        moved = not np.array_equal(self._now.view(np.uint32), self._last.view(np.uint32))
        self._still = 0 if moved else self._still + 1
        self._moves += moved
        self._last, self._now = self._now, self._last
        facts: dict[str, float | Tensor] = {"ema_still": float(self._still)}
        if self._moves == 0 and self._is_waiting():
            facts = {}  # an average that is told to begin later (SWA) has not begun
        bad = ~np.isfinite(self._last)
        if not bad.any():
            return facts, {}
        spans = zip(self._part.names, self._part.bounds[:-1], self._part.bounds[1:], strict=True)
        return facts | {"ema_bad": float(bad.sum())}, {"ema_bad": tuple(n for n, a, b in spans if bad[a:b].any())[:4]}

    def _is_waiting(self) -> bool:
        started = getattr(self._ema, "n_averaged", None)
        return isinstance(started, Tensor) and started.is_cpu and not float(started) > 0
