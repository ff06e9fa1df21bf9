"""WIRE016: an optimizer setting that no training is meant to have."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, ClassVar, SupportsFloat

from torch.optim import Optimizer

from trimtab.doctor.checklist import Line, failed, passed
from trimtab.doctor.probe import Probe

SHRINK = 0.1
"""The part of a weight that one step may take away."""
SWAMPED = 100.0
"""How many times the gradient a weight decay that is added to it may be."""


class OptimizerSettings:
    """An optimizer setting that no training is meant to have.

    ## What it means
    A weight decay that takes away a tenth of each weight in every step, a momentum of 1 or more that never slows down,
    or betas in the wrong order.

    ## How it is checked
    Every group, at the highest learning rate of its schedule. Weight decay is judged by its effect: the part of a
    weight that one step takes away, and its size against the gradient.

    ## What to try
    1. Usual are weight_decay 0 to 0.1, momentum 0.9, betas (0.9, 0.999).
    """

    code: ClassVar[str] = "WIRE016"
    name: ClassVar[str] = "optimizer-settings"
    title: ClassVar[str] = "weight decay, momentum and betas are sane"
    causes: ClassVar[tuple[str, ...]] = ("learning-rate", "not-learning", "weights-unchanged")

    def run(self, probe: Probe) -> Iterator[Line]:
        """Report settings that cannot work."""
        settings: list[str] = []
        for optimizer, peaks in zip(probe.optimizers, probe.peak_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, peaks, strict=True):
                wrong = self._wrong(probe, optimizer, group, rate)
                if wrong:
                    cause, evidence, fix = wrong
                    yield failed(self, cause, f"{type(optimizer).__name__}: {evidence}", fix, ("optimizer",))
                    return
                settings.append(settings_of(optimizer, group))
        yield passed(self, "; ".join(dict.fromkeys(settings)))

    def _wrong(
        self, probe: Probe, optimizer: Optimizer, group: dict[str, Any], rate: float
    ) -> tuple[str, str, str] | None:
        decay, momentum = float(group.get("weight_decay") or 0.0), float(group.get("momentum") or 0.0)
        betas = tuple(float(b) for b in group.get("betas") or ())
        if momentum >= 1.0:
            return "a momentum of 1 or more never slows down.", f"momentum {momentum:g}", "momentum=0.9"
        if len(betas) == 2 and betas[0] ** 2 > betas[1]:
            return "the betas are in the wrong order.", f"betas {betas}", "betas=(0.9, 0.999)"
        if decay < 0:
            return "a negative weight decay lets the weights grow.", f"weight_decay {decay:g}", "weight_decay=0.01"
        decoupled = (
            bool(group.get("decoupled_weight_decay")) or "betas" not in group or "AdamW" in type(optimizer).__name__
        )
        if decoupled and decay > 1.0 and rate * decay > SHRINK:
            evidence = f"weight_decay {decay:g} x lr {rate:g} takes {rate * decay:.0%} of every weight in each step"
            return "the weight decay is far too large.", evidence, "weight_decay=0.01"
        ratio = decay_against_gradient(probe, group, decay)
        if not decoupled and ratio > SWAMPED:
            evidence = f"weight_decay {decay:g} times the weights is {ratio:.0f} times the gradient"
            return "the weight decay is far larger than the gradient.", evidence, "weight_decay=1e-4"
        return None


def settings_of(optimizer: Optimizer, group: dict[str, Any]) -> str:
    """The settings of one group in one line."""
    keys = ("lr", "momentum", "betas", "eps", "weight_decay", "nesterov", "amsgrad")
    parts = [
        f"{k} {_short(group[k])}" for k in keys if (k in group and group[k] not in (None, False, 0, 0.0)) or k == "lr"
    ]
    return f"{type(optimizer).__name__} with {len(group['params'])} parameters: {', '.join(parts)}"


def _short(value: object) -> str:
    return f"{float(value):g}" if isinstance(value, SupportsFloat) else str(value)


def decay_against_gradient(probe: Probe, group: dict[str, Any], decay: float) -> float:
    """How large the pull of the weight decay is beside the first gradient."""
    steps = probe.events("step")
    if not decay or not steps:
        return 0.0
    norms = steps[0].facts["gradients"].present
    grad = math.sqrt(sum(norms.get(id(p), 0.0) ** 2 for p in group["params"]))
    size = math.sqrt(sum(float(p.detach().double().square().sum()) for p in group["params"] if id(p) in norms))
    return decay * size / grad if grad > 0 and math.isfinite(grad) else 0.0
