"""Adaptive gradient clipping: no unit's gradient may be large beside the unit's own weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trimtab.core.clipping import Agc
from trimtab.sample import measure

HUGE = 1e15
"""Above this norm the squares of float32 values come near overflow: float64 is used, at its price."""


def clip(params: Sequence[Tensor], settings: Agc, *, scale: Tensor | None = None, wide: bool | None = None) -> Tensor:
    """Limit the gradient norm of every unit to `ratio * max(weight norm, eps)`, in place, without asking the host.

    There must be a gradient. Returns, on the device, what became of the whole norm: clipped over unclipped. `scale`
    is what a GradScaler multiplied the gradients with. Of a sharded parameter this rank's part is seen: rows are whole
    where it is sharded by rows. A unit that is not finite is left as it is.
    """
    places: dict[torch.device, list[Tensor]] = {}
    for p in params:
        if p.grad is not None:
            places.setdefault(p.device, []).append(p)
    squares = [_on_one_device(mine, settings, scale, wide) for mine in places.values()]
    before, after = torch.stack([s.to(squares[0].device, non_blocking=True) for s in squares]).sum(0).unbind()
    return torch.where(torch.isfinite(before) & (before > 0), (after / before).sqrt(), 1.0).float()


def _on_one_device(params: list[Tensor], settings: Agc, scale: Tensor | None, wide: bool | None) -> Tensor:
    """The squares of the norm before and after clipping these parameters."""
    device = params[0].device
    exact = device.type not in ("cpu", "mps") if wide is None else wide and device.type != "mps"
    units = [_Units(p, torch.float64 if exact else None) for p in params]
    norms = torch.cat([u.norms.reshape(-1) for u in units])
    limit = torch.cat([u.weights.reshape(-1) for u in units]).clamp(min=settings.eps) * settings.ratio
    if scale is not None:
        limit = limit * scale.to(device, non_blocking=True)
    over = (norms > limit) & torch.isfinite(norms)
    coef = torch.where(over, limit / norms, 1.0)
    pieces = torch.split(coef, [u.norms.numel() for u in units])
    torch._foreach_mul_([u.values for u in units], [u.spread(c) for u, c in zip(units, pieces, strict=True)])
    sound = torch.where(torch.isfinite(norms), norms, 0.0)
    return torch.stack([sound.square().sum(), (sound * coef).square().sum()])


class _Units:
    """One parameter's units: the norm of each one's gradient and weights, and the stored values they scale."""

    def __init__(self, param: Tensor, dtype: torch.dtype | None) -> None:
        grad = param.grad
        assert grad is not None
        self._rows: Tensor | None = None
        weight, values = measure.plain(param), measure.plain(grad)
        by_row = param.dim() > 1
        if grad.layout is torch.sparse_coo:
            # Duplicate rows add up when they are applied: the norm is that of the sum, the scale goes to every part.
            by_row = by_row and grad.sparse_dim() == 1
            if by_row:
                self._seen = grad.coalesce().indices()[0]
                self._rows, self._num_rows = grad._indices()[0], param.shape[0]
                weight = weight.index_select(0, self._seen)
        elif grad.layout is not torch.strided:
            by_row = False
        self.norms = _norms(values, by_row, dtype)
        self.weights = _norms(weight, by_row, dtype)
        self.values = values if grad.layout is torch.strided else measure.stored(grad)

    def spread(self, coef: Tensor) -> Tensor:
        """The factor of each unit, in a shape that multiplies the stored values.

        Its type stays: a float32 factor of bfloat16 values, or a float64 one of values near overflow, keeps its digits.
        """
        if self._rows is not None:
            whole = torch.ones(self._num_rows, dtype=coef.dtype, device=coef.device)
            coef = whole.index_copy_(0, self._seen, coef).index_select(0, self._rows)
        # Never fewer dimensions than the values: a number beside a tensor would take on the tensor's type.
        return coef.reshape(-1, *[1] * (self.values.dim() - 1)) if self.values.dim() else coef.reshape(())


def _norms(values: Tensor, by_row: bool, dtype: torch.dtype | None) -> Tensor:
    if dtype is None and values.dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32
    dims = tuple(range(1, values.dim())) if by_row else None
    norms: Tensor = torch.linalg.vector_norm(values, 2.0, dim=dims, dtype=dtype)
    return norms
