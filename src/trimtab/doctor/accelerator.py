"""What is different on an accelerator: sums in any order, and an assertion in a kernel that ends everything."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from trimtab.doctor.loader_scan import Leaf

LOST = ("device-side assert", "unspecified launch failure", "illegal memory access")


def may_reorder(device: torch.device) -> bool:
    """Whether the same sum may come out differently the next time."""
    return device.type not in ("cpu", "meta")


@contextmanager
def in_order(device: torch.device) -> Iterator[None]:
    """With algorithms whose order is fixed, wherever there are such; nothing changes on a CPU."""
    if not may_reorder(device):
        yield
        return
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = cudnn


def is_lost(text: object) -> bool:
    """Whether an error says that this process can use its GPU no more.

    Example:
        >>> is_lost(RuntimeError("CUDA error: device-side assert triggered"))
        True
    """
    return any(one in str(text) for one in LOST)


def out_of_range(model: nn.Module, leaves: Mapping[str, Leaf]) -> list[tuple[str, str]]:
    """Tensors of a batch with numbers that no table and no layer of the model has a place for, and why.

    A kernel's assertion does not say what it was about, and nothing on the device can be read after it: this is told
    from what was written down of the data before.
    """
    tables = [(n, m.num_embeddings) for n, m in model.named_modules() if isinstance(m, nn.Embedding)]
    widths = [(n, m.out_features) for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    places = tables + widths[-1:]
    found = []
    for path, leaf in leaves.items():
        if not (leaf.label_like and leaf.counts):
            continue
        low, high = min(v for v in leaf.counts if v != -100) if set(leaf.counts) - {-100} else 0, max(leaf.counts)
        told = f"tensor {path} of the batch goes from {low} to {high}"
        if low < 0:
            found.append((path, told))
        elif places and all(high >= size for _, size in places):
            name, size = max(places, key=lambda one: one[1])
            found.append((path, f"{told}, and {name} has {size} places"))
    return found
