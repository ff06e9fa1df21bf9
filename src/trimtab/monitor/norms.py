"""Norms of tensors, gradients and parameters that do not overflow, and clipping by them: NaN in, NaN out."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.core.errors import InputError
from trimtab.guard import protect as reflex
from trimtab.monitor.snapshot import Source, named_tensors, snapshot, wide_norms
from trimtab.sample.measure import reference as measure
from trimtab.sample.transfer import number, to_host

log = logging.getLogger("trimtab")

MAX_NORM = 1.5
"""What the documented transformer clips to."""
VANISHING, EXPLODING = 0.01, 100.0
"""Of the output layer's gradient: the bounds between which a layer's is healthy."""
MOST_SORTED = 1 << 22
"""Elements that percentiles are taken of; of more an even sample is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientNorms:
    """The size of all gradients: their L2 norm, the largest element, and the mean size of an element."""

    total_norm: float
    max_grad: float
    mean_grad_abs: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScale:
    """A layer's gradient per element relative to the output layer's: `vanishing`, `healthy` or `exploding`."""

    name: str
    scale: float
    state: str


def compute_l2_norm(tensor: Tensor) -> float:
    """The L2 norm of one tensor; non-finite only where the tensor is.

    Example:
        >>> import torch
        >>> from trimtab.monitor import compute_l2_norm
        >>> compute_l2_norm(torch.tensor([3.0, 4.0])), compute_l2_norm(torch.tensor([3e30, 4e30])) < 5.1e30
        (5.0, True)
    """
    return _norm([tensor])


def compute_global_gradient_norm(source: Source) -> float:
    """The L2 norm of all gradients of a model or of some parameters taken together; 0.0 where there are none.

    Example:
        >>> import torch
        >>> from trimtab.monitor import compute_global_gradient_norm
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
        >>> compute_global_gradient_norm([weight])
        5.0
    """
    return _norm(_gradients(source))


def compute_parameter_norm(source: Source) -> float:
    """The L2 norm of all parameters, trainable or not; a tied one counts once.

    Example:
        >>> import torch
        >>> from trimtab.monitor import compute_parameter_norm
        >>> compute_parameter_norm([torch.ones(3), torch.ones(6)])
        3.0
    """
    return _norm([tensor for _, tensor in named_tensors(source)])


def clip_gradients_by_global_norm(source: Source, max_norm: float = MAX_NORM) -> float:
    """Scale all gradients down to a common norm of at most `max_norm`; returns the norm before.

    On finite gradients this is `clip_grad_norm_`, except that huge ones are scaled, not zeroed. Gradients with a NaN or
    Inf are left as they are, since scaling would spread it: the norm returned says so, and skipping the step is right.

    Example:
        >>> import torch
        >>> from trimtab.monitor import clip_gradients_by_global_norm
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> (weight * torch.tensor([3.0, 4.0])).sum().backward()
        >>> clip_gradients_by_global_norm([weight], max_norm=1.0), weight.grad.norm().round(decimals=3)
        (5.0, tensor(1.))
    """
    if not max_norm >= 0:
        raise InputError(f"max_norm is {max_norm}; expected a number of at least 0, such as {MAX_NORM}")
    grads = _gradients(source)
    if not grads:
        return 0.0
    total, norm = _total(grads)
    if not math.isfinite(norm):
        log.warning(
            "gradients hold NaN or Inf (norm %s) and were not clipped: scaling them would spread it; skip this step",
            norm,
        )
        return norm
    factor = max_norm / (total + reflex.SAFE_EPS)
    coef = number(factor)
    if coef < 1.0:
        _scale(grads, factor, coef)
    return norm


def scale_gradients(source: Source, factor: float) -> None:
    """Multiply every gradient by a number, in place.

    Example:
        >>> import torch
        >>> from trimtab.monitor import scale_gradients
        >>> weight = torch.zeros(1, requires_grad=True)
        >>> weight.sum().backward()
        >>> scale_gradients([weight], 0.5)
        >>> weight.grad
        tensor([0.5000])
    """
    values = [measure.stored(_local(g)) for g in _gradients(source)]
    if values:
        torch._foreach_mul_(values, float(factor))


def gradient_norms(source: Source) -> GradientNorms:
    """Total norm, largest element and mean size of an element of all gradients; zeros where there are none.

    Example:
        >>> import torch
        >>> from trimtab.monitor import gradient_norms
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> (weight * torch.tensor([3.0, -4.0])).sum().backward()
        >>> gradient_norms([weight])
        GradientNorms(total_norm=5.0, max_grad=4.0, mean_grad_abs=3.5)
    """
    seen = snapshot(source)
    there = seen.present
    if not there.any():
        return GradientNorms(total_norm=0.0, max_grad=0.0, mean_grad_abs=0.0)
    sizes = seen.numel[there]
    return GradientNorms(
        total_norm=seen.global_norm,
        max_grad=float(seen.absmax[there].max()),
        mean_grad_abs=float((seen.abs_mean[there] * sizes).sum() / max(sizes.sum(), 1)),
    )


def gradient_percentiles(source: Source, q: Sequence[float] = (10, 50, 90, 99)) -> dict[str, float]:
    """Percentiles of the size of single gradient elements over a whole model; empty where there are no gradients.

    Of more than four million elements an even sample is taken; a NaN makes all of them NaN.

    Example:
        >>> import torch
        >>> from trimtab.monitor import gradient_percentiles
        >>> weight = torch.zeros(101, requires_grad=True)
        >>> (weight * torch.arange(101.0)).sum().backward()
        >>> gradient_percentiles([weight])
        {'p10': 10.0, 'p50': 50.0, 'p90': 90.0, 'p99': 99.0}
    """
    if any(not 0 <= p <= 100 for p in q):
        raise InputError(f"q is {tuple(q)}; expected percentages between 0 and 100")
    flat = [measure.plain(g).reshape(-1) for g in _gradients(source)]
    flat = [t for t in flat if t.numel()]
    if not flat:
        return {}
    stride = max(math.ceil(sum(t.numel() for t in flat) / MOST_SORTED), 1)
    home = flat[0].device
    sizes = to_host(torch.cat([t[::stride].abs().to(home, torch.float32, non_blocking=True) for t in flat]))
    with np.errstate(all="ignore"):
        found = np.percentile(sizes, list(q)) if not np.isnan(sizes).any() else np.full(len(q), np.nan)
    return {f"p{p:g}": float(value) for p, value in zip(q, found, strict=True)}


def layer_gradient_scale(source: Source, output: str | None = None) -> dict[str, LayerScale]:
    """How large each weight matrix's gradient is per element, relative to that of the output layer.

    The output layer is the last weight matrix with a gradient, or the parameter named `output`: name it where a model
    does not define its layers in their order. Below 0.01 a layer's gradient is vanishing, above 100 exploding.

    Example:
        >>> import torch
        >>> from trimtab.monitor import layer_gradient_scale
        >>> first, last = torch.zeros(2, 2, requires_grad=True), torch.zeros(2, 2, requires_grad=True)
        >>> (1e-4 * first + last).sum().backward()
        >>> layer_gradient_scale([("first", first), ("last", last)])["first"]
        LayerScale(name='first', scale=0.0001, state='vanishing')
    """
    seen = snapshot(source, detailed=False)
    rms = seen.rms
    rows = [i for i, shape in enumerate(seen.shapes) if len(shape) >= 2 and seen.present[i]]
    if output is not None and output not in seen.names:
        raise InputError(f"there is no parameter named {output!r}; expected one of {', '.join(seen.names[:8])}, ...")
    if not rows:
        return {}
    reference = rms[rows[-1] if output is None else seen.names.index(output)]

    def state(scale: float) -> str:
        return "vanishing" if scale < VANISHING else "healthy" if scale <= EXPLODING else "exploding"

    with np.errstate(all="ignore"):
        scales = {seen.names[i]: float(f"{rms[i] / reference:.6g}") for i in rows}
    return {name: LayerScale(name=name, scale=scale, state=state(scale)) for name, scale in scales.items()}


def effective_lr(lr: float, clip: float, norm: float) -> float:
    """The learning rate that would have the same effect without clipping: `lr * clip / norm` where that is smaller.

    Where every step is clipped this, not `lr`, is how fast an SGD-like optimizer learns: clipping only hides it.

    Example:
        >>> from trimtab.monitor import effective_lr
        >>> effective_lr(0.5, clip=1.0, norm=4.0), effective_lr(0.5, clip=1.0, norm=0.5)
        (0.125, 0.5)
    """
    if math.isnan(norm):
        return math.nan
    return lr * min(1.0, clip / norm) if norm > 0 else lr


def _gradients(source: Source) -> list[Tensor]:
    return [p.grad for _, p in named_tensors(source) if p.grad is not None]


def _local(tensor: Tensor) -> Tensor:
    anything: Any = tensor
    return anything.to_local() if hasattr(tensor, "to_local") else tensor


def _norm(tensors: Sequence[Tensor]) -> float:
    return _total(tensors)[1] if tensors else 0.0


def _total(tensors: Sequence[Tensor]) -> tuple[Tensor, float]:
    """The norm of all tensors as the device has it and on the host; of sharded ones over all shards."""
    if any(hasattr(t, "full_tensor") for t in tensors):
        whole: Any = torch.nn.utils.get_total_norm([t.detach() for t in tensors])
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        return whole, number(whole)
    plain = [measure.plain(t) for t in tensors]
    total = measure.total(measure.norms(plain))
    norm = number(total)
    if not 1e-15 < norm < math.inf:  # squares that float32 cannot hold, too small or too large, or a bad value
        total = measure.total(wide_norms(plain))
        norm = number(total)
    return total, norm


def _scale(grads: Sequence[Tensor], factor: Tensor, coef: float) -> None:
    """Multiply gradients, on whatever devices they are, by a factor that the host knows too."""
    groups: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for grad in map(_local, grads):
        groups.setdefault((grad.device, grad.dtype in (torch.float64, torch.complex128)), []).append(grad)
    for (device, wide), mine in groups.items():
        if wide:  # a factor in float32 would cost them half of their digits
            torch._foreach_mul_([measure.stored(g) for g in mine], coef)
        else:
            reflex.scale_by(mine, factor.to(device), coef)
