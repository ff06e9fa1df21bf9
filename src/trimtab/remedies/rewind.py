"""The remedy `rewind`: weights, buffers, optimizer state and averages go back to before the trouble began."""

from __future__ import annotations

from typing import ClassVar

from trimtab.core.remedy import Reached, Target
from trimtab.core.types import Action, Outcome
from trimtab.torchutil.optimizers import rates_of

RESTART = 0.1
"""What the rate is multiplied with when a run begins again, where nothing better is known."""
RAISED = 1.5
"""From here on a rate counts as raised since the state was kept."""


class Rewind:
    """Restores the newest good state before `before` (`back` further ones back, where trouble returned).

    Memory is asked first, then the checkpoints of this run; those written since the trouble began are marked bad.

    The schedule, the loss scaler, random numbers and the data go on: the batches that did the damage are thereby
    skipped. Where `limit` is set and the rates were raised since, they are held at what they were, until the schedule
    itself comes back to that.
    """

    kind: ClassVar[str] = "rewind"

    @staticmethod
    def plan(action: Action, target: Target, at: int) -> str:
        """Which state it would go back to: the same text in every process, or they must not."""
        before, back = int(action.args.get("before", at)), int(action.args.get("back", 0))
        rollback = target.rollback
        sources = () if rollback is None else (rollback.memory, rollback.disk)
        found = (one.would_reach(target.label, before, back) for one in sources if one is not None)
        return next((str(step) for step in found if step is not None), "none")

    def apply(self, action: Action, target: Target, at: int) -> Outcome:
        """Go back, if there is a state to go back to."""
        if target.rollback is None:
            return Outcome(at=at, action=action, applied=False, detail="no states are kept in memory")
        before, back = int(action.args.get("before", at)), int(action.args.get("back", 0))
        memory, disk = target.rollback.memory, target.rollback.disk
        if action.args.get("buffers"):  # the batch was odd, but did nothing to the weights
            done = memory.put_buffers_back(target.label, before)
            done = done or (disk is not None and disk.put_buffers_back(target.label, before))
            told = "buffers are those of before it" if done else "there is nothing to put back"
            return Outcome(at=at, action=action, applied=done, detail=f"the weights took no harm; {told}")
        reached = memory.go_back(target.label, before, back)
        if reached is None and disk is not None:
            reached = disk.go_back(target.label, before, back)
            if reached is not None:
                memory.drop_after(target.label, reached.step)
        if disk is not None:
            disk.condemn(target.label, before, f"trouble began about step {before} and was found at step {at - 1}")
        if reached is None:
            why = memory.why_none or f"no state from before step {before} is kept"
            older = "" if disk is None else ", and no sound checkpoint of this run is older"
            return Outcome(at=at, action=action, applied=False, detail=why + older)
        target.went_back(at)
        blamed = "" if target.batches is None else target.batches.offended(target.last_step)
        blamed = f"; {blamed}" if blamed else ""
        if reached.restart:
            return self._restarted(action, target, at, reached, blamed)
        limited = _hold_rates(reached.rates, target) if action.args.get("limit", 0.0) else ""
        gone = f"; {reached.missing} tensors are no longer there" if reached.missing else ""
        young = "" if reached.proven else ", which had not been proven good yet"
        detail = (
            f"weights, buffers and optimizer state are those after step {reached.step} again, {reached.source}{young} "
            f"(the trouble began about step {before}); data, schedule and random numbers go on{limited}{gone}{blamed}"
        )
        return Outcome(at=at, action=action, applied=True, detail=detail)

    @staticmethod
    def _restarted(action: Action, target: Target, at: int, reached: Reached, blamed: str) -> Outcome:
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
            f"initial ones again; data, schedule and random numbers go on{held}{gone}{blamed}"
        )
        return Outcome(at=at, action=action, applied=True, detail=detail)


def _hold_rates(old: list[float], lane: Target) -> str:
    """Limit rates that were raised since; says so."""
    now = rates_of(lane.optimizer)
    if not old or not any(n > RAISED * o for n, o in zip(now, old + [max(old)] * len(now), strict=False)):
        return ""
    most = [old[i] if i < len(old) else max(old) for i in range(len(now))]
    lane.multiplier.limit(most)
    return f"; the rate ({max(now):.3g}) is held at {max(most):.3g}"
