"""AMP002: gradients are lost because float16 cannot hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from trimtab.doctor.batch_tensors import fresh
from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.observed_step import make_call
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Watch
from trimtab.torchutil.patch import wrap_attribute

SHARE, LITTLE = 0.1, 0.001
"""How much may be lost with a scaler, and how much without one is already proof."""


class GradientUnderflow:
    """Gradients are lost because float16 cannot hold them.

    ## What it means
    Below 6e-8 a float16 is 0. Without a GradScaler small gradients vanish on their way back, and the layers that get
    them stop learning, without any error.

    ## How it is checked
    The same backward pass twice, in float16 and in float32: which share of what is not 0 in the one is 0 in the other.

    ## What to try
    1. `scaler = torch.amp.GradScaler()`, `scaler.scale(loss).backward()`.
    2. bfloat16 has the range of float32 and needs none.
    """

    code: ClassVar[str] = "AMP002"
    name: ClassVar[str] = "gradient-underflow"
    title: ClassVar[str] = "float16 gradients do not vanish"
    causes: ClassVar[tuple[str, ...]] = ("zero-gradient", "weights-unchanged", "not-learning")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report gradients that are 0 in float16 only."""
        forwards = probe.events("forward")
        half = any(p.dtype is torch.float16 for p in probe.model.parameters())
        low = half or any(e.facts["autocast"] is torch.float16 for e in forwards)
        if not low or probe.no_steps:
            yield not_applicable(self, probe.no_steps or "nothing is computed in float16")
            return
        scaled = any(e.facts["scaled"] for e in probe.events("backward"))
        lost = None if probe.too_slow or half else lost_to_half(probe)
        evidence = (
            "could not be measured"
            if lost is None
            else f"{lost:.1%} of the gradient is 0 in float16 and not in float32"
        )
        scale = next((c.scale for c in probe.through if c.scale is not None), None)
        if scaled and (lost is None or lost <= SHARE):
            yield passed(self, f"{evidence}; the scale is {scale:g}" if scale is not None else evidence)
            return
        cause = (
            "float16 without a GradScaler: small gradients vanish." if not scaled else "the loss scale is too small."
        )
        fix = "scaler = torch.amp.GradScaler(); scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()"
        tell = failed if scaled or lost is None or lost > LITTLE else warned
        yield tell(self, cause, evidence, fix, ("gradients",), share=lost or 0.0)


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
    watch = Watch(probe.model, probe.optimizers, num_graphs=0, keep_gradients=True)
    with probe.trial(rates=False), watch.listening():
        make_call(probe.target, fresh(probe.batch(0)), watch, options, doctor_steps=probe.doctor_steps)
    return watch.gradients[0] if watch.gradients else {}


@contextmanager
def _in_full() -> Iterator[None]:
    """Every autocast that is entered is off."""

    def off(inner: Callable[..., None], *args: object, **kwargs: object) -> None:
        inner(*args, **(kwargs | {"enabled": False}))

    undo = wrap_attribute(torch.autocast, "__init__", off)
    try:
        yield
    finally:
        undo()
