"""Updates that are lost to rounding: weights of low precision that have a gradient and stay what they were, and weights
that somebody rounds between the steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.sample.transfer import Later, Notes, is_here, number, sent, to_host

EVERY, FIRST = 20, 10
NUM_PARAMS, NUM_READ = 8, 4096
LOW = (torch.float16, torch.bfloat16)
MIN_WEIGHTS = 64
FIRST_LOOKS, LATER_EVERY = 64, 200
"""Whether weights are rounded is looked at until the first of these steps, and then this seldom: it is a habit."""
LOW_BITS = (1 << 13) - 1
"""Bits of a float32 that neither a float16 nor a bfloat16 has: of a weight that was trained one in 8192 has none."""


class RoundingProbe:
    """Copies the beginning of some weights before a step, and compares it afterwards."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        low = [p for p in params if p.dtype in LOW and p.numel() > 1 and not hasattr(p, "to_local")]
        self._params = low[:: max(-(-len(low) // NUM_PARAMS), 1)]
        full = [p for p in params if p.dtype is torch.float32 and p.numel() > 1 and not hasattr(p, "to_local")]
        self._full = full[:: max(-(-len(full) // NUM_PARAMS), 1)]
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def is_due(self, step: int) -> bool:
        """Whether the next step is compared."""
        return len(self._params) > 0 and step % EVERY == FIRST

    def looks_at_digits(self, step: int) -> bool:
        """Whether it is asked in this step if something rounds the weights between steps."""
        return ((step % EVERY == FIRST and step < FIRST_LOOKS) or step % LATER_EVERY == FIRST) and len(self._full) > 0

    def digits(self) -> tuple[dict[str, float], Later | None]:
        """The share of float32 weights that a 16 bit type could hold: at once, or once it has arrived from a device."""
        found = [p for p in self._full if p.grad is not None]
        if not found:
            return {}, None
        if all(map(is_here, found)):
            bits = np.concatenate([to_host(_lead(p)).view(np.int32) for p in found])
            used = bits != 0
            return _coarse(float(((bits & LOW_BITS == 0) & used).sum()), float(used.sum())), None
        words = torch.cat([_lead(p).view(torch.int32) for p in found])
        there = words != 0
        copy = sent(torch.stack([((words & LOW_BITS == 0) & there).sum(), there.sum()]))

        def later(facts: dict[str, float], notes: Notes) -> None:
            facts |= _coarse(*map(float, to_host(copy)))

        return {}, later

    def before(self) -> None:
        """Copy, with which of the weights have a gradient."""
        self._kept = [
            (p, _lead(p).clone(), _lead(p.grad) != 0)
            for p in self._params
            if p.grad is not None and p.grad.layout is torch.strided
        ]

    def after(self) -> tuple[dict[str, float], Later | None]:
        """The share of those that have not changed: at once, or once it has arrived from a device."""
        kept, self._kept = self._kept, []
        if not kept:
            return {}, None
        still = torch.stack([((_lead(p) == old) & moved).sum() for p, old, moved in kept]).sum()
        whole = torch.stack([moved.sum() for _, _, moved in kept]).sum()
        if is_here(still):
            return _told(number(still), number(whole)), None
        copy = sent(torch.stack([still, whole]))

        def later(facts: dict[str, float], notes: Notes) -> None:
            facts |= _told(*map(float, to_host(copy)))

        return {}, later


def _told(still: float, whole: float) -> dict[str, float]:
    return {"rounded_away": still / whole} if 0 < still < whole else {}  # all of them: the step was not made


def _coarse(num: float, whole: float) -> dict[str, float]:
    return {"coarse_weights": num / whole} if whole >= MIN_WEIGHTS and num > 0.5 * whole else {}


def _lead(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:NUM_READ]
