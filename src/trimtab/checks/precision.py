"""One backward pass in half and in full precision: what the half one loses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trimtab.checks.drive import make_call
from trimtab.checks.leaves import fresh
from trimtab.checks.probe import Probe
from trimtab.checks.watch import Watch


def lost_to_half(probe: Probe) -> float | None:
    """The share of gradient values that are 0 as the training computes them and not 0 in full precision."""
    low = _gradients(probe, full=False)
    with _in_full():
        high = _gradients(probe, full=True)
    lost = there = 0
    for key, grad in high.items():
        if key in low and grad.layout is torch.strided and low[key].layout is torch.strided:
            real = grad != 0
            there += int(real.sum())
            lost += int((real & (low[key] == 0)).sum())
    return lost / there if there else None


def _gradients(probe: Probe, *, full: bool) -> dict[int, Tensor]:
    options = replace(probe.options, amp_dtype="none") if full else probe.options
    watch = Watch(probe.model)
    watch.graphs_left, watch.keep_gradients = 0, True
    with probe.trial(rates=False), watch.listening():
        for one in probe.optimizers:
            watch.know(one)
        make_call(probe.target, fresh(probe.batch(0)), watch, options, ours=probe.ours)
    return watch.gradients[0] if watch.gradients else {}


@contextmanager
def _in_full() -> Iterator[None]:
    """Whoever asks for autocast gets none."""
    inner = torch.autocast.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        inner(self, *args, **(kwargs | {"enabled": False}))

    torch.autocast.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__init__ = inner  # type: ignore[method-assign]
