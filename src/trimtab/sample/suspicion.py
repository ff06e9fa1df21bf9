"""Whether this very step deserves a full measurement. Decided inside the step, so it does not depend on the lag."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

RATIO = 8.0
MIN_HISTORY = 16


class Suspicion:
    """A short memory of the gradient norm: non-finite, or far above all of it, looks wrong."""

    def __init__(self) -> None:
        self._norms: deque[float] = deque(maxlen=64)

    def looks_wrong(self, norm: float, loss: float | None) -> bool:
        """Judge one step, then remember its norm."""
        if not math.isfinite(norm) or (loss is not None and not math.isfinite(loss)):
            return True
        known = self._norms
        wrong = len(known) >= MIN_HISTORY and norm > RATIO * max(known)
        known.append(norm)
        return wrong

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._norms = deque(state["norms"], maxlen=64)
