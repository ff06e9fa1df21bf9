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
                coef = _scale(mine, measure.total(parts[list(members)]), float(group.get("max_norm", clip.norm)))
                judged.coef = min(judged.coef, coef)
    elif clip.norm is not None:
        judged.coef = _scale(grads, measure.total(parts), clip.norm)
    if clip.value is not None:
        values = [measure.stored(g) for g in grads]
        torch._foreach_clamp_min_(values, -clip.value)
        torch._foreach_clamp_max_(values, clip.value)


def _scale(grads: Sequence[Tensor], norm: Tensor, max_norm: float) -> float:
    """Multiply by max_norm/norm where that is below 1: the very operations of `clip_grad_norm_`, for the same bits."""
    if not math.isfinite(number(norm)):  # finite values whose squares overflow: judge() has looked
        norm = measure.total(measure.wide_norms([measure.plain(g) for g in grads]))
    factor = max_norm / (norm + SAFE_EPS)
    coef = number(factor)
    if not coef < 1.0:
        return 1.0
    values = [measure.stored(g) for g in grads]
    if coef < 1e-30:
        # A factor that small is a denormal float32 and would lose its digits: go there in two strides.
        torch._foreach_mul_(values, 1e-20)
        torch._foreach_mul_(values, coef / 1e-20)
    else:
        torch._foreach_mul_(values, factor.to(torch.float32))
    return coef


def supports_gate(optimizer: Optimizer) -> bool:
    """Whether this instance skips a step on a device flag (fused Adam, AdamW, SGD): PyTorch's undocumented protocol."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    # A fused momentum SGD that is told to skip its very first step keeps an uninitialised buffer: that one step goes
    # the other way, by the host.
    momentum = any(g.get("momentum") for g in optimizer.param_groups)
    return not (momentum and not optimizer.state)


class DeviceGate:
    """Clip coefficient and reject flag as device scalars, handed to a fused optimizer without asking the host."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._found_before: Tensor | None = None
        self._scale_before: Tensor | None = None
        self._had = (False, False)

    def arm(self, norm: Tensor, config: Config, *, scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Set the gate for this step; returns (clip coefficient, reject flag) for the table.

        `scale` is what a GradScaler multiplied the gradients with and has not divided out yet.
        """
        optimizer = self._optimizer
        reject = torch.zeros_like(norm)
        coef = torch.ones_like(norm)
        if config.mode != "observe":
            if config.reject_nonfinite:
                reject = (~torch.isfinite(norm)).to(norm.dtype)
            if config.reject_above is not None:
                reject = torch.maximum(reject, (norm > config.reject_above).to(norm.dtype))
            if config.clip.norm is not None:
                coef = torch.nan_to_num(config.clip.norm / (norm + SAFE_EPS), nan=1.0, posinf=1.0).clamp(max=1.0)
        self._had = (hasattr(optimizer, "found_inf"), hasattr(optimizer, "grad_scale"))
        self._found_before = getattr(optimizer, "found_inf", None)
        self._scale_before = getattr(optimizer, "grad_scale", None)
        flag = reject.to(torch.float32)
        found = self._found_before
        optimizer.found_inf = flag if found is None else torch.maximum(found.to(flag.device), flag)
        if config.clip.norm is not None and config.mode != "observe":
            # grad_scale makes the fused kernel rewrite every gradient: set it only when clipping was asked for.
            inverse = (1.0 / coef.clamp(min=1e-30)).to(torch.float32)
            optimizer.grad_scale = inverse if scale is None else inverse * scale.to(inverse.device)
        return coef, reject

    def disarm(self) -> None:
        """Leave the attributes as they were: a GradScaler deletes its own."""
        optimizer = self._optimizer
        for had, name, before in zip(
            self._had, ("found_inf", "grad_scale"), (self._found_before, self._scale_before), strict=True
        ):
            if had:
                setattr(optimizer, name, before)
            elif hasattr(optimizer, name):
                delattr(optimizer, name)
