"""What was seen while a training stepped: events in their order, and one record for every call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trimtab.checks.graph import LossFacts


@dataclass(slots=True)
class Event:
    """Something that happened.

    `kind` is forward, backward, clip, scale, unscale, step, scaler-step, update, schedule or zero.
    """

    kind: str
    call: int
    who: int = 0
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Gradients:
    """The gradients of one optimizer at the moment of its step: norms by parameter, None where there is none."""

    norms: dict[int, float | None]
    carried: int = 0
    shared_with: int | None = None

    @property
    def present(self) -> dict[int, float]:
        """Those that there are."""
        return {k: v for k, v in self.norms.items() if v is not None}


@dataclass(slots=True)
class Failure:
    """An exception that ended a call: where it was raised, in words."""

    kind: str
    text: str
    where: str
    module: str
    phase: str
    trace: str = ""


@dataclass(slots=True)
class Call:
    """One call of the training: what it was given, what it returned, and what changed."""

    index: int
    events: list[Event] = field(default_factory=list)
    loss: float | None = None
    loss_shape: tuple[int, ...] | None = None
    loss_kind: str = ""
    requires_grad: bool = False
    loss_device: str = ""
    loss_dtype: Any = None
    facts: LossFacts = field(default_factory=LossFacts)
    failure: Failure | None = None
    warnings: list[str] = field(default_factory=list)
    modules: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    reached: set[int] = field(default_factory=set)
    strangers: list[Any] = field(default_factory=list)
    changes: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    rates: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    output: Tensor | None = None
    inputs: list[Tensor] = field(default_factory=list)
    lookups: list[tuple[Any, Tensor]] = field(default_factory=list)
    seconds: float = 0.0
    norm_before: float | None = None
    norm_after: float | None = None
    scale: float | None = None
    average: float | None = None

    def note_losses(self) -> None:
        """Fill in what a call that was only watched is known by: the loss that backward was called on."""
        backwards = self.of("backward")
        if backwards and self.loss is None:
            self.loss, self.loss_shape, self.requires_grad = backwards[-1].facts.get("value"), (), True

    def of(self, kind: str) -> list[Event]:
        """Its events of one kind."""
        return [e for e in self.events if e.kind == kind]
