"""A loop with a guard attached to it, and the samples that came of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from trimtab import Guard
from trimtab.core.types import Sample


def is_inert(hook: Any) -> bool:
    """Whether a hook is what a copied model is left with."""
    return isinstance(getattr(hook, "__self__", None), nullcontext)


class Kept:
    """A sink that keeps the samples."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def write(self, record: object) -> None:
        if isinstance(record, Sample):
            self.samples.append(record)

    def close(self) -> None:
        pass

    def all(self, name: str) -> list[float | None]:
        """A scalar of every sample."""
        return [s.scalars.get(name) for s in self.samples]

    def notes(self, name: str) -> list[tuple[str, ...]]:
        return [s.notes.get(name, ()) for s in self.samples]


@contextmanager
def attached(model: nn.Module, optimizer: Any, **kwargs: Any) -> Iterator[tuple[Guard, Kept]]:
    """A guard by hooks alone; its samples are complete when the block is left."""
    kept = Kept()
    guard = Guard.attach(model, optimizer, mode="observe", run_dir=False, sinks=[kept], **kwargs)
    try:
        yield guard, kept
    finally:
        guard.close()


def mlp(width: int = 8) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))


def batch(num: int = 8, seed: int | None = None) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    return torch.randn(num, 4, generator=generator), torch.randint(0, 3, (num,), generator=generator)


def loss_of(model: nn.Module) -> Tensor:
    x, y = batch()
    return nn.functional.cross_entropy(model(x), y)


def train(
    model: nn.Module,
    optimizer: Any,
    num: int,
    *,
    between: Callable[[int], None] = lambda step: None,
    after: Callable[[int], None] = lambda step: None,
) -> None:
    """A plain loop: `between` runs before the step, with its gradients there, `after` runs behind zero_grad."""
    for step in range(num):
        loss_of(model).backward()
        between(step)
        optimizer.step()
        optimizer.zero_grad()
        after(step)
