"""Batches with something replaced: to see what the loss depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trimtab.doctor.batch_tensors import is_label_like, leaves, mapped
from trimtab.doctor.probe import Probe


def other_inputs(probe: Probe) -> Any:
    """The first batch with the inputs of other samples in the place of its own; None where nothing could be changed."""
    return _replaced(probe, probe.roles.inputs)


def other_targets(probe: Probe) -> Any:
    """The first batch with one target for all its samples; None where nothing could be changed."""
    changed: list[str] = []

    def change(path: str, tensor: Tensor) -> Tensor:
        if path not in probe.roles.targets or tensor.numel() < 2 or not bool((tensor != tensor.reshape(-1)[0]).any()):
            return tensor
        changed.append(path)
        return torch.zeros_like(tensor) + tensor.reshape(-1)[0]

    out = mapped(probe.batch(0), change)
    return out if changed else None


def _replaced(probe: Probe, paths: tuple[str, ...]) -> Any:
    batch = probe.batch(0)
    other = dict(leaves(probe.batch(1))) if len(probe.scan.batches) > 1 else {}
    changed: list[str] = []

    def change(path: str, tensor: Tensor) -> Tensor:
        if path not in paths:
            return tensor
        new = _another(tensor, other.get(path))
        if new is not tensor:
            changed.append(path)
        return new

    out = mapped(batch, change)
    return out if changed else None


def _another(tensor: Tensor, other: Tensor | None) -> Tensor:
    if tensor.numel() == 0 or tensor.is_meta:
        return tensor
    if tensor.is_floating_point() and tensor.numel() > 1:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            size = tensor.detach().float().std(correction=0)
            size = size if bool(torch.isfinite(size)) and bool(size > 0) else torch.ones_like(size)
            noise = torch.randn(tensor.shape, dtype=torch.float32, device="cpu") * size.cpu()
        return (tensor + noise.to(tensor.device, tensor.dtype)).detach()
    if is_label_like(tensor) or tensor.dtype is torch.uint8:
        for new in (tensor.roll(1, 0), other, tensor.flip(-1) if tensor.dim() else None):
            if new is not None and new.shape == tensor.shape and not torch.equal(new, tensor):
                return new
    return tensor
