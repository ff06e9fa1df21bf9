"""The tensors of a batch, each with its place: to look at them one by one, and to put others there."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

MAX_DEPTH = 4
LARGE = 1 << 22


def leaves(batch: Any, at: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its path.

    Example:
        >>> [path for path, _ in leaves({"x": torch.ones(1), "more": [torch.ones(2), torch.ones(3)]})]
        ['x', 'more.0', 'more.1']
    """
    if isinstance(batch, np.ndarray) and batch.dtype.kind in "fiub":
        yield at, torch.from_numpy(batch)
    elif isinstance(batch, Tensor):
        yield at, batch
    elif depth < MAX_DEPTH:
        for key, part in _parts(batch):
            yield from leaves(part, f"{at}.{key}" if at else str(key), depth + 1)


def _parts(batch: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(batch, Mapping):
        yield from batch.items()
    elif isinstance(batch, list | tuple):
        yield from enumerate(batch)
    elif hasattr(batch, "data") and isinstance(getattr(batch, "data", None), dict):
        yield from batch.data.items()


def mapped(batch: Any, change: Callable[[str, Tensor], Tensor], at: str = "", depth: int = 0) -> Any:
    """The same batch with every tensor changed; what is no tensor stays.

    Example:
        >>> mapped((torch.ones(1), "a"), lambda path, t: t + 1)
        (tensor([2.]), 'a')
    """
    if isinstance(batch, Tensor):
        return change(at, batch)
    if depth >= MAX_DEPTH:
        return batch

    def inner(key: Any, part: Any) -> Any:
        return mapped(part, change, f"{at}.{key}" if at else str(key), depth + 1)

    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(inner(i, part) for i, part in enumerate(batch)))
    if isinstance(batch, list | tuple):
        return type(batch)(inner(i, part) for i, part in enumerate(batch))
    if isinstance(batch, Mapping):
        found = {key: inner(key, part) for key, part in batch.items()}
        try:
            return found if isinstance(batch, dict) and type(batch) is dict else type(batch)(found)  # type: ignore[call-arg]
        except Exception:
            return found
    return batch


def fresh(batch: Any) -> Any:
    """A copy that may be changed in place."""
    return mapped(batch, lambda _, t: t.detach().clone().requires_grad_(t.requires_grad))


def num_samples(batch: Any) -> int | None:
    """How many samples there are: the leading size that most tensors share."""
    sizes = [t.shape[0] for _, t in leaves(batch) if t.dim()]
    return max(set(sizes), key=lambda n: (sizes.count(n), -sizes.index(n))) if sizes else None


def mark(tensor: Tensor) -> int:
    """A fingerprint of all its values."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return id(tensor)
    flat = tensor.detach().cpu().contiguous().reshape(-1)[:LARGE]
    raw = (
        flat.view(torch.uint8)
        if flat.numel() and not flat.is_complex()
        else torch.view_as_real(flat)
        if flat.numel()
        else flat
    )
    return zlib.crc32(raw.numpy().tobytes(), tensor.numel() & 0xFFFF)


def is_label_like(tensor: Tensor) -> bool:
    """Whole numbers that are no mask and no image."""
    return not tensor.is_floating_point() and not tensor.is_complex() and tensor.dtype not in (torch.bool, torch.uint8)
