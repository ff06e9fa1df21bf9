"""Same-step protection: clip the gradients and decide whether this update may reach the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from trimtab.core.config import Clip, Config
from trimtab.sample import measure
from trimtab.sample.host import number
from trimtab.sample.measure import Limits

SAFE_EPS = 1e-6
"""Added to the norm before dividing, as `clip_grad_norm_` does: results must agree with it."""


@dataclass(slots=True)
class Judged:
    """What the reflex knows about one step, on the host."""

    norm: float
    nonfinite: bool
    reject: bool
    coef: float = 1.0


def judge(norm: float, plain: Sequence[Tensor], config: Config) -> Judged:
    """Look at the global norm; where it is not finite look again before calling the gradients bad."""
    nonfinite = False
    if not math.isfinite(norm):
        # The square of a huge finite value overflows: only a wide accumulation proves a NaN or Inf.
        wide = number(measure.total(measure.wide_norms(plain)))
        nonfinite = not math.isfinite(wide)
        norm = norm if nonfinite else wide
    if config.mode == "observe":
        return Judged(norm, nonfinite, reject=False)
    too_large = config.reject_above is not None and norm > config.reject_above
    return Judged(norm, nonfinite, reject=(nonfinite and config.reject_nonfinite) or too_large)


def clip_host(
    judged: Judged,
    clip: Clip,
    grads: Sequence[Tensor],
    parts: Tensor,
    groups: Sequence[Mapping[str, Any]],
    rows: Sequence[Sequence[int]],
) -> None:
    """Clip in place by host-known norms. `rows[g]` lists which of `grads` belong to parameter group g."""
    if clip.norm is not None and clip.per_group:
        for group, members in zip(groups, rows, strict=True):
            if members:
                mine = [grads[i] for i in members]
                limit = float(group.get("max_norm", clip.norm))
                coef = _scale(mine, measure.total(parts[list(members)]), limit, clip.above)
                judged.coef = min(judged.coef, coef)
    elif clip.norm is not None:
        judged.coef = _scale(grads, measure.total(parts), clip.norm, clip.above)
    if clip.value is not None:
        values = [measure.stored(g) for g in grads]
        torch._foreach_clamp_min_(values, -clip.value)
        torch._foreach_clamp_max_(values, clip.value)


def _scale(grads: Sequence[Tensor], norm: Tensor, max_norm: float, above: float | None = None) -> float:
    """Multiply by max_norm/norm where that is below 1: the very operations of `clip_grad_norm_`, for the same bits."""
    if not math.isfinite(number(norm)):  # finite values whose squares overflow: judge() has looked
        norm = measure.total(measure.wide_norms([measure.plain(g) for g in grads]))
    factor = max_norm / (norm + SAFE_EPS)
    coef = number(factor)
    if not coef < 1.0 or (above is not None and number(norm) <= above):
        return 1.0
    scale_by(grads, factor, coef)
    return coef


def scale_by(grads: Sequence[Tensor], factor: Tensor, coef: float) -> None:
    """Multiply in place by a factor whose value the host knows to be `coef`."""
    values = [measure.stored(g) for g in grads]
    if coef < 1e-30:
        # A factor that small is a denormal float32 and would lose its digits: go there in two strides.
        torch._foreach_mul_(values, 1e-20)
        torch._foreach_mul_(values, coef / 1e-20)
    else:
        wide = any(v.dtype is torch.float64 for v in values)
        torch._foreach_mul_(values, factor if wide else factor.to(torch.float32))


def supports_gate(optimizer: Optimizer) -> bool:
    """Whether this instance skips a step on a device flag (fused Adam, AdamW, SGD): PyTorch's undocumented protocol."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # A fused momentum SGD that is told to skip its very first step keeps an uninitialised buffer: that one step goes
    # the other way, by the host.
    momentum = any(g.get("momentum") for g in optimizer.param_groups)
    return not (momentum and not optimizer.state)


def gate_can(optimizer: Optimizer, config: Config) -> bool:
    """Whether everything this configuration asks for can be decided on the device and told to this optimizer there."""
    return supports_gate(optimizer) and not config.clip.per_group and config.clip.value is None


def limits_of(config: Config) -> Limits:
    """What the device may decide by itself under a configuration."""
    if config.mode == "observe":
        return Limits(reject_nonfinite=False)
    return Limits(
        max_norm=config.clip.norm,
        clip_above=config.clip.above,
        reject_above=config.reject_above,
        reject_nonfinite=config.reject_nonfinite,
    )


class DeviceGate:
    """Hands reject flag and clip coefficient to a fused optimizer as device scalars, without asking the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._before: dict[str, Tensor | None] = {}
        self._armed: tuple[str, ...] = ()

    def arm(self, reject: Tensor, inverse_coef: Tensor | None, scale: Tensor | None) -> None:
        """Set the gate for this step.

        `scale` is what a GradScaler multiplied the gradients with and has not divided out yet. `grad_scale` makes the
        fused kernel rewrite every gradient, so it is set only when clipping was asked for.
        """
        optimizer = self._optimizer
        names = ("found_inf",) if inverse_coef is None else ("found_inf", "grad_scale")
        self._before = {name: getattr(optimizer, name) for name in names if hasattr(optimizer, name)}
        found = self._before.get("found_inf")
        optimizer.found_inf = reject if found is None else torch.maximum(found.to(reject.device), reject)
        if inverse_coef is not None:
            optimizer.grad_scale = inverse_coef if scale is None else inverse_coef * scale.to(inverse_coef.device)
        self._armed = names

    def disarm(self) -> None:
        """Leave the attributes as they were: a GradScaler deletes its own."""
        for name in self._armed:
            if name in self._before:
                setattr(self._optimizer, name, self._before[name])
            elif hasattr(self._optimizer, name):
                delattr(self._optimizer, name)
        self._armed = ()
