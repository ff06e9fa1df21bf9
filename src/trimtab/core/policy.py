"""The default policy: for each kind of trouble a ladder, climbed while the trouble lasts, left when it ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.core.config import Config, PolicyConfig
from trimtab.core.types import Action, Decision, Finding, Severity, Verdict

SKIP = Action(kind="skip")
STOP = Action(kind="stop")


def _cut(factor: float) -> Action:
    return Action(kind="cut_lr", args={"factor": factor})


def _decay(factor: float) -> Action:
    return Action(kind="raise_weight_decay", args={"factor": factor})


Rungs = tuple[tuple[int, tuple[Action, ...]], ...]

# (strike, what is done at that strike). A strike is one bad step; the count starts again after a quiet spell.
_NONFINITE: Rungs = (
    (1, (SKIP, _cut(0.5))),
    (2, (SKIP,)),
    (10, (SKIP, _cut(0.5))),
    (25, (SKIP, _cut(0.5))),
    (50, (STOP,)),
)
_EXPLOSION: Rungs = ((1, (_cut(0.1),)), (20, (_cut(0.1),)), (100, (STOP,)))
_TOO_FAST: Rungs = ((1, (_cut(0.1),)), (20, (_cut(0.1),)))  # a rate can be put right: no reason to stop
_LOST: Rungs = ((3, (STOP,)),)  # nothing mends it from inside; three, so that one odd reading ends no run
LADDERS: Mapping[str, Rungs] = {
    "nonfinite-gradient": _NONFINITE,
    "nonfinite-loss": _NONFINITE,
    "exploding-gradient": _EXPLOSION,
    "loss-spike": _EXPLOSION,
    "diverging-loss": _EXPLOSION,
    "weight-jump": _EXPLOSION,
    "learning-rate": _TOO_FAST,
    "update-ratio": _TOO_FAST,
    "oscillating-loss": ((1, (_cut(0.5),)), (20, (_cut(0.5),))),
    "nonfinite-validation": ((1, (_cut(0.5),)), (5, (_cut(0.5),))),
    "overfitting": ((1, (_decay(1.5),)), (5, (_decay(1.5),)), (20, (_decay(1.5),))),
    # The scaler has backed off as far as it can, so backing off further is no help. A smaller rate may bring the loss
    # back into range; if it does not, no step will be made any more.
    "scale-collapse": ((1, (_cut(0.5),)), (50, (STOP,))),
    "nonfinite-weight": _LOST,
    "nonfinite-optimizer-state": _LOST,
}
"""A name that is missing has no remedy here: nonfinite-buffer, say, was already put back inside the step."""

GENTLE = frozenset({"raise_weight_decay", "back_off_scaler"})
"""These may follow a mere warning; every other action needs an ERROR."""
FREE = frozenset({"skip", "stop"})
"""These know neither cool-down nor budget: a skip was done inside the step and only goes on record, a stop ends it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Climbs one rung at a time, with a quiet time between actions of one kind and a budget for the run."""

    settings: PolicyConfig

    @classmethod
    def from_config(cls, config: Config) -> Ladder:
        """The ladder with a configuration's cool-down, budget and quiet spell."""
        return cls(settings=config.policy)

    def init(self) -> Mapping[str, Any]:
        """The state before the first verdict."""
        return {"strikes": {}, "last_bad": {}, "last_done": {}, "spent": 0}

    def decide(self, state: Mapping[str, Any], verdict: Verdict) -> tuple[Mapping[str, Any], Decision]:
        """What to do about a verdict, and the state to decide the next one with."""
        idle = Decision(about=verdict.step, at=verdict.seen_at + 1, optimizer=verdict.optimizer)
        treatable = [f for f in verdict.findings if _allowed(f)]
        if not treatable:
            return state, idle
        # The gravest is acted on; of equals the first, which is the first cause.
        finding = max(treatable, key=lambda f: f.severity)
        struck = {f.name: self._strikes(state, f) for f in treatable}
        last_done, spent = dict(state["last_done"]), int(state["spent"])
        actions = []
        for action in self._due(finding, struck[finding.name]):
            if action.kind not in FREE:
                last = last_done.get(action.kind)
                in_cooldown = last is not None and verdict.step - last < self.settings.cooldown
                if in_cooldown or spent >= self.settings.budget:
                    continue
                last_done[action.kind] = verdict.step
                spent += 1
            actions.append(action)
        new = {
            "strikes": {**state["strikes"], **struck},
            "last_bad": {**state["last_bad"], **dict.fromkeys(struck, verdict.step)},
            "last_done": last_done,
            "spent": spent,
        }
        if not actions:
            return new, idle
        return new, Decision(
            about=idle.about, at=idle.at, optimizer=idle.optimizer, actions=tuple(actions), because=(finding.code,)
        )

    def _strikes(self, state: Mapping[str, Any], finding: Finding) -> int:
        last = state["last_bad"].get(finding.name)
        if last is None or finding.step - last > self.settings.quiet:
            return 1
        return int(state["strikes"].get(finding.name, 0)) + 1

    def _due(self, finding: Finding, strikes: int) -> tuple[Action, ...]:
        """The actions of the rung that has been reached: those with a price only when it has just been reached."""
        ladder = LADDERS[finding.name]
        rung = next((actions for strike, actions in reversed(ladder) if strikes >= strike), ())
        fresh = any(strike == strikes for strike, _ in ladder)
        return tuple(a for a in rung if _may(a, finding.severity) and (a.kind in FREE or fresh))


def _may(action: Action, severity: Severity) -> bool:
    return severity >= Severity.ERROR or action.kind in GENTLE


def _allowed(finding: Finding) -> bool:
    """Whether the finding's ladder holds anything that its severity allows."""
    return any(_may(a, finding.severity) for _, actions in LADDERS.get(finding.name, ()) for a in actions)
