"""What a fault of known origin is: a small program that goes bad, and the truth about where and why."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

MARK = "# origin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A model, a batch, and one whole step on it: forward, loss, backward, and perhaps the optimizer."""

    model: nn.Module
    batch: Any
    step: Callable[[Any], Tensor]
    optimizer: torch.optim.Optimizer | None = None
    extra: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """Where the bad value comes from. Where several answers are right, the one that helps most comes first."""

    ops: tuple[str, ...] = ()  # without "aten." and overload; empty: what is bad was bad before any op
    modules: tuple[str, ...] = ("",)
    phase: str = "forward"
    causes: tuple[str, ...] = ("op",)
    reasons: tuple[str, ...] = ()  # empty: any
    subjects: tuple[str, ...] = ()  # the input, parameter or buffer that was bad
    samples: tuple[int, ...] | None = None  # None: no sample is to blame
    micro: tuple[int, tuple[int, ...]] | None = None  # the same as a micro-batch and the samples in it


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of the catalogue; without a truth it is healthy, and a trace must find nothing."""

    name: str
    area: str
    build: Callable[[], Program]
    truth: Truth | None

    @property
    def lines(self) -> range:
        """The source line that the origin is on, as a range; empty where no line is to blame."""
        text, start = inspect.getsourcelines(self.build)
        marked = [start + number for number, line in enumerate(text) if MARK in line]
        assert len(marked) <= 1, f"{self.name} has {len(marked)} lines marked {MARK}"
        return range(marked[0], marked[0] + 1) if marked else range(0)


class Catalogue:
    """Faults by name, in the order in which they are written down."""

    def __init__(self) -> None:
        self.faults: dict[str, Fault] = {}

    def fault(self, area: str, truth: Truth) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
        """Add a program that goes bad."""
        return self._adding(area, truth)

    def healthy(self) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
        """Add a program that has NaN or Inf on its way and is sound."""
        return self._adding("healthy", None)

    def _adding(self, area: str, truth: Truth | None) -> Callable[[Callable[[], Program]], Callable[[], Program]]:
        def add(build: Callable[[], Program]) -> Callable[[], Program]:
            name = build.__name__
            assert name not in self.faults, name
            self.faults[name] = Fault(name=name, area=area, build=build, truth=truth)
            return build

        return add


class Part(nn.Module):
    """A module without parameters that calls a function."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*args)


def chain(**parts: nn.Module) -> nn.Sequential:
    """Modules one after the other, under these names."""
    return nn.Sequential(OrderedDict(parts))


def linear(inside: int = 4, outside: int = 4, *, weight: float | None = None) -> nn.Linear:
    """A layer without bias, of random or of equal weights."""
    made = nn.Linear(inside, outside, bias=False)
    if weight is not None:
        nn.init.constant_(made.weight, weight)
    return made


def rows(num: int = 8, width: int = 4, **special: float) -> Tensor:
    """Positive random rows, the row `_3` filled with a value by `_3=0.0`."""
    drawn = torch.rand(num, width, generator=torch.Generator().manual_seed(1), device="cpu")
    made = drawn.to(torch.get_default_device()) + 0.5
    for name, value in special.items():
        made[int(name.removeprefix("_"))] = value
    return made


def square_mean(out: Tensor) -> Tensor:
    return out.square().mean()


def program(
    model: nn.Module, batch: Any, loss: Callable[[Tensor], Tensor] = square_mean, optimizer: Any = None
) -> Program:
    """The usual step: the model on the batch (a tuple is its arguments), the loss of that, backward."""

    def step(batch: Any) -> Tensor:
        out = model(*batch) if isinstance(batch, tuple) else model(batch)
        value = loss(out)
        value.backward()
        if optimizer is not None:
            optimizer.step()
        return value

    return Program(model=model, batch=batch, step=step, optimizer=optimizer)


def is_bad(program: Program, loss: Tensor) -> bool:
    """Whether the loss, a gradient or a weight is not finite."""
    values = [loss, *program.model.state_dict().values()]
    values += [p.grad for p in program.model.parameters() if p.grad is not None]
    return any(not bool(torch.isfinite(v).all()) for v in values)
