"""WIRE022: the gradients are not those of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from trimtab.core.window import listed
from trimtab.doctor.batch_tensors import fresh
from trimtab.doctor.checklist import Line, failed, not_applicable, passed, warned
from trimtab.doctor.observed_step import make_call
from trimtab.doctor.probe import Probe
from trimtab.doctor.recording import Watch

MAX_PARTS = 10
STEPS = (1.0, 0.5, 0.25, 0.125)
CONVERGED, OFF = 0.1, 0.3


class Gradcheck:
    """The gradients are not those of the loss.

    ## What it means
    A hand-written backward pass, a hook or a `.data` trick gives a direction in which the loss does not fall as fast as
    the gradient says, or rises.

    ## How it is checked
    Part by part of the model: the loss a small step along the gradient ahead and behind, with the same batch and the
    same random numbers, in steps of several sizes. Only where these agree with each other and not with the gradient is
    anything said. Gradients that are meant to be different (reversal, straight-through) show here as well: then ignore
    this check.

    ## What to try
    1. `torch.autograd.gradcheck(YourFunction.apply, inputs)` in double precision.
    2. Look for `register_hook`, `.data` and in-place changes under `no_grad`.
    """

    code: ClassVar[str] = "WIRE022"
    name: ClassVar[str] = "gradcheck"
    title: ClassVar[str] = "gradients are those of the loss"
    causes: ClassVar[tuple[str, ...]] = ("not-learning", "learning-rate")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report gradients that lead elsewhere."""
        why = probe.no_experiments
        found: list[Slope] | str = why or slopes(probe)
        if isinstance(found, str):
            yield not_applicable(self, found)
            return
        sure = [s for s in found if s.converged]
        wrong = [s for s in sure if not s.fits]
        if wrong:  # a second opinion from beside the kinks that zeros put a training on
            again = slopes(probe, nudged=True)
            still = {s.part for s in again if s.converged and not s.fits} if isinstance(again, list) else set()
            wrong = [s for s in wrong if s.part in still]
        if not sure:
            yield not_applicable(self, "the loss is too rough for finite differences")
            return
        if not wrong:
            worst = max(sure, key=lambda s: abs(s.measured / s.claimed - 1.0))
            yield passed(self, f"{len(sure)} parts, the worst off by {abs(worst.measured / worst.claimed - 1.0):.1%}")
            return
        one = wrong[0]
        made = probe.facts.custom
        hooks = tuple(n for n, p in probe.trainable.items() if p._backward_hooks)
        evidence = (
            f"along its gradient {one.part} changes the loss by {one.measured:.3g}, not {one.claimed:.3g}, per unit"
        )
        tell = failed if made or hooks else warned
        yield tell(
            self,
            f"the gradient of {listed(tuple(s.part for s in wrong))} is not that of the loss.",
            evidence
            + (f"; hand-written: {', '.join(made[:3])}" if made else "")
            + (f"; hooks on {listed(hooks)}" if hooks else ""),
            "torch.autograd.gradcheck(YourFunction.apply, (x.double().requires_grad_(),))",
            tuple(s.part for s in wrong)[:8],
            measured=one.measured,
            claimed=one.claimed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """The change of the loss per unit along the gradient of one part: as claimed, and as measured in two step sizes."""

    part: str
    claimed: float
    measured: float
    again: float

    @property
    def converged(self) -> bool:
        """Whether two step sizes agree."""
        size = max(abs(self.measured), abs(self.again), 0.05 * self.claimed)
        return abs(self.measured - self.again) < CONVERGED * size

    @property
    def fits(self) -> bool:
        """Whether the gradient says the same."""
        return abs(self.measured - self.claimed) < OFF * self.claimed


def slopes(probe: Probe, *, nudged: bool = False) -> list[Slope] | str:
    """Measure, or say why it cannot be measured; `nudged`: a little beside where the training begins.

    Zeros put a training on the kink of a ReLU, where a gradient is right and the loss bends all the same.
    """
    if any(p.dtype in (torch.float16, torch.bfloat16) or p.is_complex() for p in probe.model.parameters()):
        return "the weights are of low precision or complex"
    if not probe.doctor_steps and any(e.facts["autocast"] is not None for e in probe.events("forward")):
        return "the step runs in low precision"
    if any(e.facts["scaled"] or e.facts["in_step"] for e in probe.events("backward")) and not probe.doctor_steps:
        return "the loss is scaled, or computed in a closure"
    if len(probe.calls[0].of("backward")) != 1:
        return f"one call has {len(probe.calls[0].of('backward'))} backward passes"
    at = _Point(probe, nudged=nudged)
    loss = at.loss({})
    grads = {k: g for k, g in at.gradients.items() if g.layout is torch.strided}
    if loss is None or not grads or not all(bool(torch.isfinite(g).all()) for g in grads.values()):
        return "loss or gradients are not finite"
    whole = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    found: list[Slope] = []
    for part, params in _parts(probe, grads).items():
        norm = math.sqrt(sum(float(grads[id(p)].double().square().sum()) for p in params))
        if norm > 1e-3 * whole and (slope := _slope(at, part, params, grads, norm, loss)) is not None:
            found.append(slope)
    return found or "no part has a gradient large enough to measure"


class _Point:
    """Computes the loss of the first batch at displaced weights; all else is as it was."""

    def __init__(self, probe: Probe, *, nudged: bool) -> None:
        self._probe = probe
        self._nudges = [(p, _nudge(p, i)) for i, p in enumerate(probe.trainable.values())] if nudged else []
        self._options = replace(probe.options, amp_dtype="none", clip_grad_norm=0.0)
        self.gradients: dict[int, Tensor] = {}

    def loss(self, by: dict[int, tuple[Tensor, Tensor]]) -> float | None:
        """The loss with each of these parameters moved by so much."""
        probe = self._probe
        with probe.trial(rates=False):
            for own in probe.model.parameters():
                own.grad = None  # what an earlier pass left there is no part of this one
            with torch.no_grad():
                for param, shift in (*self._nudges, *by.values()):
                    param.add_(shift)
            probe.reseed()
            watch = Watch(probe.model, probe.optimizers, num_graphs=0, keep_gradients=not by)
            target = replace(probe.target, scaler=None) if probe.doctor_steps else probe.target
            with watch.listening():
                call, _ = make_call(
                    target, fresh(probe.batch(0)), watch, self._options, doctor_steps=probe.doctor_steps
                )
            if not by and watch.gradients:
                self.gradients = watch.gradients[0]
            backwards = call.of("backward")
            value = backwards[0].facts.get("value") if backwards and call.failure is None else None
        return value if value is None or math.isfinite(value) else None


def _nudge(param: Tensor, seed: int) -> Tensor:
    size = float(param.detach().double().square().mean().sqrt()) if param.numel() else 0.0
    noise = torch.randn(param.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32, device="cpu")
    return noise.to(param.device, param.dtype) * (0.02 * size if size > 1e-6 else 0.02)


def _parts(probe: Probe, grads: dict[int, Tensor]) -> dict[str, list[Tensor]]:
    """Parameters by the module they are in; by larger modules where there are too many."""
    named = {n: p for n, p in probe.trainable.items() if id(p) in grads and grads[id(p)].layout is torch.strided}
    for depth in (4, 3, 2, 1):
        parts: dict[str, list[Tensor]] = {}
        for name, p in named.items():
            parts.setdefault(".".join(name.split(".")[:-1][:depth]) or name, []).append(p)
        if len(parts) <= MAX_PARTS:
            return parts
    return {"the model": list(named.values())}


def _slope(
    at: _Point, part: str, params: list[Tensor], grads: dict[int, Tensor], norm: float, loss: float
) -> Slope | None:
    size = math.sqrt(sum(float(p.detach().double().square().sum()) for p in params))
    # So far that float32 can see the change, and not so far that the loss bends: the gradient itself says how far.
    far = max(min(1e-2 * max(abs(loss), 1e-3) / norm, 0.02 * max(size, 1e-3)), 1e-6)
    seen: list[float] = []
    for part_of in STEPS:
        by = far * part_of
        ahead = at.loss({id(p): (p, grads[id(p)] * (by / norm)) for p in params})
        behind = at.loss({id(p): (p, grads[id(p)] * (-by / norm)) for p in params})
        if ahead is None or behind is None:
            return None
        seen.append((ahead - behind) / (2.0 * by))
        if len(seen) >= 2 and abs(seen[-1] - norm) < OFF * norm:
            break
    pairs = [(abs(a - b), a, b) for a, b in pairwise(seen)]
    _, again, measured = min(pairs)
    noise = 4e-7 * max(abs(loss), 1e-6) / (far * STEPS[len(seen) - 1])
    if noise > 0.1 * norm:
        return None
    return Slope(part=part, claimed=norm, measured=measured, again=again)
