"""Gradients too small for float16: how much is lost at the scale in use, and whether the scale itself collapsed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trimtab.core.types import Column
from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import number, to_host
from trimtab.torchutil.scaler import scale_of

MIN_SCALE = 2.0
"""A scale below this has been backed off again and again: the documented criterion."""
UNDERFLOW_SHARE = 0.1
SUBNORMAL = 2.0**-10
"""Times a value: what then looks too small for float16 is subnormal there, and keeps only some of its digits."""
NUM_WORST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AmpUnderflow:
    """What float16 makes of the gradients: shares of the elements that are not zero.

    `underflow_frac` becomes 0, `subnormal_frac` keeps only some digits; `worst` are the parameters that lose most.
    `scale` is the scaler's, None without one; `backed_off` says that it fell below 2: overflow, not underflow.
    """

    underflow_frac: float
    subnormal_frac: float
    scale: float | None
    backed_off: bool
    worst: tuple[str, ...] = ()
    share: float = UNDERFLOW_SHARE

    @property
    def underflow(self) -> bool:
        """Whether more than `share` of the gradient is lost."""
        return self.underflow_frac > self.share

    def __bool__(self) -> bool:
        """True when something is wrong."""
        return self.underflow or self.backed_off


def check_amp_underflow(
    model: nn.Module, scaler: Any = None, *, unscaled: bool | None = None, share: float = UNDERFLOW_SHARE
) -> AmpUnderflow:
    """Measure which part of the gradients float16 cannot hold at the current scale; call it after backward.

    `unscaled` says whether the gradients were unscaled already; None asks the scaler. Without a scaler they are judged
    as they are. What already is exactly 0 cannot be told from a true zero, and is left out: gradients that were
    computed in float16 have lost it before anybody could look.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> (model(torch.ones(1, 2)) * 1e-9).sum().backward()
        >>> check_amp_underflow(model).underflow_frac
        1.0
        >>> check_amp_underflow(model, torch.amp.GradScaler("cpu", init_scale=65536.0), unscaled=True).underflow_frac
        0.0
    """
    found = scale_of(scaler)
    scale = None if found is None else number(found)
    if unscaled is None:
        unscaled = _was_unscaled(scaler)
    factor = scale if scale is not None and unscaled else 1.0
    named = [(name, measure.plain(p.grad)) for name, p in model.named_parameters() if p.grad is not None]
    backed_off = scale is not None and scale < MIN_SCALE
    if not named:
        return AmpUnderflow(underflow_frac=0.0, subnormal_frac=0.0, scale=scale, backed_off=backed_off, share=share)
    sizes = np.array([t.numel() for _, t in named], np.float64)
    table = to_host(torch.cat([_twice(t, factor).to(named[0][1].device) for _, t in named])).astype(np.float64)
    columns = list(Column)
    zero, tiny = table[:, columns.index(Column.ZERO_FRAC)], table[:, columns.index(Column.UNDERFLOW_FRAC)]
    alive = sizes * (1.0 - zero[::2])
    lost, dim = sizes * tiny[::2], sizes * tiny[1::2]
    total = max(float(alive.sum()), 1.0)
    order = np.argsort(-lost / np.maximum(alive, 1.0), kind="stable")[:NUM_WORST]
    return AmpUnderflow(
        underflow_frac=float(lost.sum()) / total,
        subnormal_frac=float((dim - lost).sum()) / total,
        scale=scale,
        backed_off=backed_off,
        worst=tuple(named[i][0] for i in order if lost[i] > 0),
        share=share,
    )


def _twice(tensor: Tensor, factor: float) -> Tensor:
    """Its columns at this scale, and again so small that subnormal values show as underflow."""
    wide = tensor.float() if tensor.device.type == "mps" else tensor.double()
    return measure.full([wide * factor, wide * (factor * SUBNORMAL)])


def _was_unscaled(scaler: Any) -> bool:
    states = getattr(scaler, "_per_optimizer_states", None) or {}
    return any(getattr(state.get("stage"), "name", "READY") != "READY" for state in states.values())
