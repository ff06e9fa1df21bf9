"""The remedy `rewind`: weights, buffers, optimizer state and averages go back to before the trouble began."""

from __future__ import annotations

from typing import Any, ClassVar

from trimtab.act.ring import Ring, rates_of
from trimtab.core.types import Action, Outcome

RAISED = 1.5
"""From here on a rate counts as raised since the state was kept."""


class Rewind:
    """Restores the newest good state before `before` (`back` further ones back, where trouble returned).

    The schedule, the loss scaler, random numbers and the data go on: the batches that did the damage are thereby
    skipped. Where `limit` is set and the rates were raised since, they are held at what they were, until the schedule
    itself comes back to that.
    """

    kind: ClassVar[str] = "rewind"

    def apply(self, action: Action, target: Any, at: int) -> Outcome:
        """Go back, if there is a state to go back to."""
        ring: Ring | None = getattr(target, "ring", None)
        if ring is None:
            return Outcome(at=at, action=action, applied=False, detail="no states are kept in memory")
        before, back = int(action.args.get("before", at)), int(action.args.get("back", 0))
        state = ring.before(target.label, before, back)
        if state is None:
            why = ring.why_none or f"no state from before step {before} is kept"
            return Outcome(at=at, action=action, applied=False, detail=why)
        missing = ring.go_back_to(state)
        target.rewound_at = at
        limited = _hold_rates(ring.sound_rates(target.label, state), target) if action.args.get("limit", 0.0) else ""
        gone = f"; {missing} tensors are no longer there" if missing else ""
        young = "" if state.good else ", which had not been proven good yet"
        detail = (
            f"weights, buffers and optimizer state are those after step {state.steps[target.label]} again{young} (the "
            f"trouble began about step {before}); data, schedule and random numbers go on{limited}{gone}"
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
