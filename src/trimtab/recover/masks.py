"""Buffers that hold infinities on purpose: the masks of attention, which are no sign of trouble."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trimtab.recover.modules import plain_name


@torch.no_grad()
def masks_of(section: str, module: nn.Module | None) -> set[str]:
    """The names (`model.mask`) of buffers that hold nothing but -inf, 0 and 1.

    Statistics that went wrong do not look like that, so a mask may pass where everything else must be finite.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> model.register_buffer("mask", torch.full((2, 2), float("-inf")).triu(1))
        >>> model.register_buffer("mean", torch.tensor([0.3, float("-inf")]))
        >>> masks_of("model", model)
        {'model.mask'}
    """
    if not isinstance(module, nn.Module):
        return set()
    found = module.named_buffers(remove_duplicate=False)
    return {f"{section}.{plain_name(module, name)}" for name, buffer in found if _is_mask(buffer)}


def _is_mask(buffer: Tensor) -> bool:
    if buffer.is_meta or buffer.layout is not torch.strided or not buffer.is_floating_point() or buffer.numel() < 2:
        return False
    if buffer.element_size() == 1:  # 8-bit floats know no arithmetic
        buffer = buffer.float()
    return bool((buffer.isneginf() | (buffer == 0) | (buffer == 1)).all())
