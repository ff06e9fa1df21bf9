"""The same training with batches of another size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler

from trimtab.checks.leaves import mapped, num_samples
from trimtab.checks.target import Target


def _head(size: int, num: int | None, path: str, tensor: Tensor) -> Tensor:
    return tensor[:size] if tensor.dim() and tensor.shape[0] == num else tensor


def smaller(target: Target, size: int) -> Target:
    """The same training with batches of another size, where the loader can be made anew; else the first samples."""
    loader = target.loader
    if isinstance(loader, DataLoader) and loader.batch_size is not None:
        shuffled = isinstance(loader.sampler, RandomSampler)
        made: Any = DataLoader(loader.dataset, size, shuffle=shuffled, collate_fn=loader.collate_fn)
        return replace(target, loader=made)

    class Sliced:
        def __iter__(self) -> Iterator[Any]:
            for batch in loader:
                yield mapped(batch, partial(_head, size, num_samples(batch)))

    return replace(target, loader=Sliced())
