"""The remedy `rewind`: weights, buffers, optimizer state and averages go back to before the trouble began."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from trimtab.core.types import Action, Outcome
from trimtab.torchutil.param_groups import rates_of

RESTART = 0.1
"""What the rate is multiplied with when a run begins again, where nothing better is known."""
RAISED = 1.5
"""From here on a rate counts as raised since the state was kept."""


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


class Rewind:
    """Restores the newest good state before `before` (`back` further ones back, where trouble returned).

    Memory is asked first, then the checkpoints of this run; those written since the trouble began are marked bad.

    The schedule, the loss scaler, random numbers and the data go on: the batches that did the damage are thereby
    skipped. Where `limit` is set and the rates were raised since, they are held at what they were, until the schedule
    itself comes back to that.
    """

    kind: ClassVar[str] = "rewind"

    @staticmethod
    def plan(action: Action, target: Any, at: int) -> str:
        """Which state it would go back to: the same text in every process, or they must not."""
        before, back = int(action.args.get("before", at)), int(action.args.get("back", 0))
        sources = [getattr(target, name, None) for name in ("ring", "disk")]
        found = (one.would_reach(target.label, before, back) for one in sources if one is not None)
        return next((str(step) for step in found if step is not None), "none")

    def apply(self, action: Action, target: Any, at: int) -> Outcome:
        """Go back, if there is a state to go back to."""
        ring: StatesInMemory | None = getattr(target, "ring", None)
        if ring is None:
            return Outcome(at=at, action=action, applied=False, detail="no states are kept in memory")
        before, back = int(action.args.get("before", at)), int(action.args.get("back", 0))
        disk: StatesOnDisk | None = getattr(target, "disk", None)
        if action.args.get("buffers"):  # the batch was odd, but did nothing to the weights
            done = ring.put_buffers_back(target.label, before)
            done = done or (disk is not None and disk.put_buffers_back(target.label, before))
            told = "buffers are those of before it" if done else "there is nothing to put back"
            return Outcome(at=at, action=action, applied=done, detail=f"the weights took no harm; {told}")
        reached = ring.go_back(target.label, before, back)
        if reached is None and disk is not None:
            reached = disk.go_back(target.label, before, back)
            if reached is not None:
                ring.drop_after(target.label, reached.step)
        if disk is not None:
            disk.condemn(target.label, before, f"trouble began about step {before} and was found at step {at - 1}")
        if reached is None:
            why = ring.why_none or f"no state from before step {before} is kept"
            older = "" if disk is None else ", and no sound checkpoint of this run is older"
            return Outcome(at=at, action=action, applied=False, detail=why + older)
        target.rewound_at, target.stale = at, False  # its own step is over; those of other lanes may still be to come
        if reached.restart:
            return self._restarted(action, target, at, reached)
        limited = _hold_rates(reached.rates, target) if action.args.get("limit", 0.0) else ""
        gone = f"; {reached.missing} tensors are no longer there" if reached.missing else ""
        young = "" if reached.proven else ", which had not been proven good yet"
        detail = (
            f"weights, buffers and optimizer state are those after step {reached.step} again, {reached.source}{young} "
            f"(the trouble began about step {before}); data, schedule and random numbers go on{limited}{gone}"
        )
        return Outcome(at=at, action=action, applied=True, detail=detail)

    @staticmethod
    def _restarted(action: Action, target: Any, at: int, reached: Reached) -> Outcome:
        """No good state exists: begin again from the initial weights, at a fraction of the rate that spoiled them."""
        factor, before = float(action.args.get("restart", RESTART)), int(action.args.get("before", at))
        held = ""
        if action.args.get("limit", 0.0):
            rates = [rate * target.multiplier.value for rate in target.multiplier.rates()]
            target.multiplier.limit([rate * factor for rate in rates])
            held = f"; the rate ({max(rates):.3g}) is held at {max(rates) * factor:.3g}"
        gone = f"; {reached.missing} tensors are no longer there" if reached.missing else ""
        detail = (
            f"no state between the first step and step {before} is kept: weights, buffers and optimizer state are the "
            f"initial ones again; data, schedule and random numbers go on{held}{gone}"
        )
        return Outcome(at=at, action=action, applied=True, detail=detail)


def _hold_rates(old: list[float], lane: Any) -> str:
    """Limit rates that were raised since; says so."""
    now = rates_of(lane.optimizer)
    if not old or not any(n > RAISED * o for n, o in zip(now, old + [max(old)] * len(now), strict=False)):
        return ""
    most = [old[i] if i < len(old) else max(old) for i in range(len(now))]
    lane.multiplier.limit(most)
    return f"; the rate ({max(now):.3g}) is held at {max(most):.3g}"
