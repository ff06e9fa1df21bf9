"""What every part of the self-test is made of: its shape, the one way to fail, and a small network to try things on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Facts = Mapping[str, Any]


class SelfTestError(Exception):
    """Something did not behave as promised; the message says what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One promise, and what tries it: a function that raises SelfTestError, or returns what it measured."""

    name: str
    body: Callable[[torch.device], Facts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parts that are told under one heading."""

    heading: str
    parts: tuple[Part, ...]


def expect(holds: bool, message: str) -> None:
    """Fail the part unless this holds."""
    if not holds:
        raise SelfTestError(message)


def network(device: torch.device) -> nn.Module:
    """A small network with BatchNorm."""
    return nn.Sequential(nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.GELU(), nn.Linear(32, 4)).to(device)


def loss_of(model: nn.Module, device: torch.device, factor: float = 1.0) -> Tensor:
    """Its loss on a random batch, times a factor."""
    x = torch.randn(16, 16, device=device)
    return nn.functional.cross_entropy(model(x), torch.arange(16, device=device) % 4) * factor
