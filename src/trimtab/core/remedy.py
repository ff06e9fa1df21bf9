"""What a remedy is, and what it may work on: one optimizer under a guard, its rate, its states and its samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from trimtab.core.types import Action, Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Where a run has gone back to: the last step in it, whether it was proven good, and where it came from.

    `missing` tensors are no longer there to be put back; `rates` are those the run was long sound with. `restart` says
    that no step is in it: the run begins again.
    """

    step: int
    proven: bool
    source: str
    missing: int
    rates: list[float]
    restart: bool = False


class States(Protocol):
    """States of one guard that a lane can go back to."""

    def would_reach(self, label: str, before: int, back: int) -> int | None:
        """The last step in the state that `go_back` would put in place."""

    def go_back(self, label: str, before: int, back: int) -> Reached | None:
        """Put a state from before that step in place; None where there is none."""

    def put_buffers_back(self, label: str, before: int) -> bool:
        """Put only the buffers of that state in place; whether there was anything to put back."""


class StatesInMemory(States, Protocol):
    """Copies; `why_none` says why there are none."""

    why_none: str

    def drop_after(self, label: str, step: int) -> None:
        """Another state, of `step`, was put in place: forget what came after it."""


class StatesOnDisk(States, Protocol):
    """Checkpoints."""

    def condemn(self, label: str, since: int, reason: str) -> None:
        """Mark those written since that step as bad."""


class Rollback(Protocol):
    """Where a run can go back to: memory first, then disk."""

    @property
    def memory(self) -> StatesInMemory:
        """The copies."""

    @property
    def disk(self) -> StatesOnDisk | None:
        """The checkpoints of this run, if there are any."""


class RateMultiplier(Protocol):
    """Multiplies learning rates around each step; no scheduler sees it."""

    @property
    def value(self) -> float:
        """What the rates are multiplied with."""

    @property
    def limited(self) -> bool:
        """Whether rates are held at a limit."""

    def cut(self, factor: float) -> float:
        """Multiply further; the new value."""

    def rates(self) -> list[float]:
        """The rates of the groups, as their owner set them."""

    def limit(self, rates: Sequence[float]) -> None:
        """Hold the rates at these until the owner's own are below them."""


class SampleDesk(Protocol):
    """Knows which samples a step was made from."""

    def knows(self, step: int) -> bool:
        """Whether it does for this step."""

    def offended(self, step: int) -> str:
        """Note that a step did harm; samples that were in every such step are put aside, and the text says so."""

    def put_aside(self, step: int) -> tuple[int, str]:
        """Put them into quarantine: how many, and by what they are known."""


class Rated(Protocol):
    """An optimizer whose rates can be cut."""

    @property
    def optimizer(self) -> Any:
        """The optimizer itself."""

    @property
    def multiplier(self) -> RateMultiplier:
        """What its rates are multiplied with."""

    @property
    def rewound_at(self) -> int:
        """The step at which it last went back."""


class Target(Rated, Protocol):
    """One optimizer under a guard, as a remedy sees it."""

    @property
    def label(self) -> str:
        """Its name among several."""

    @property
    def scaler(self) -> Any:
        """The GradScaler of the loop, if there is one."""

    @property
    def rollback(self) -> Rollback | None:
        """States to go back to; None where none are kept."""

    @property
    def batches(self) -> SampleDesk | None:
        """The samples of the last steps, if anybody told."""

    @property
    def last_step(self) -> int:
        """The step that was judged last."""

    @property
    def last_rejected(self) -> bool:
        """Whether its update was kept out of the weights."""

    def went_back(self, at: int) -> None:
        """Note that an earlier state is in place."""

    def request_stop(self) -> None:
        """End the run as soon as the verdict is recorded."""


class Remedy(Protocol):
    """Carries out one kind of action on the live objects."""

    kind: ClassVar[str]

    def apply(self, action: Action, target: Target, at: int) -> Outcome:
        """Do it, and say what became of it."""
