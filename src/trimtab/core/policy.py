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


# (strike, what is done at that strike). A strike is one bad step; the count starts again after a quiet spell.
_NONFINITE = ((1, (SKIP, _cut(0.5))), (2, (SKIP,)), (10, (SKIP, _cut(0.5))), (25, (SKIP, _cut(0.5))), (50, (STOP,)))
_EXPLOSION = ((1, (_cut(0.1),)), (20, (_cut(0.1),)), (100, (STOP,)))
LADDERS: Mapping[str, tuple[tuple[int, tuple[Action, ...]], ...]] = {
    "nonfinite-gradient": _NONFINITE,
    "nonfinite-loss": _NONFINITE,
    "exploding-gradient": _EXPLOSION,
    "loss-spike": _EXPLOSION,
    "nonfinite-weight": ((3, (STOP,)),),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """Climbs one rung at a time, with a quiet time between cuts and a budget for the run."""

    settings: PolicyConfig

    @classmethod
    def from_config(cls, config: Config) -> Ladder:
        """The ladder with a configuration's cool-down, budget and quiet spell."""
        return cls(settings=config.policy)

    def init(self) -> Mapping[str, Any]:
        """The state before the first verdict."""
        return {"strikes": {}, "last_bad": {}, "last_cut": -(10**9), "spent": 0}

    def decide(self, state: Mapping[str, Any], verdict: Verdict) -> tuple[Mapping[str, Any], Decision]:
        """What to do about a verdict, and the state to decide the next one with."""
        idle = Decision(about=verdict.step, at=verdict.seen_at + 1, optimizer=verdict.optimizer)
        finding = _first_grave(verdict)
        if finding is None:
            return state, idle
        ladder = LADDERS[finding.name]
        strikes = self._strikes(state, finding)
        rung = next((actions for strike, actions in reversed(ladder) if strikes >= strike), ())
        fresh = any(strike == strikes for strike, _ in ladder)
        actions = tuple(a for a in rung if a.kind == "skip" or fresh)
        in_cooldown = verdict.step - state["last_cut"] < self.settings.cooldown
        spent_out = state["spent"] >= self.settings.budget
        if in_cooldown or spent_out:
            actions = tuple(a for a in actions if a.kind != "cut_lr")
        cuts = sum(a.kind == "cut_lr" for a in actions)
        new = {
            "strikes": {**state["strikes"], finding.name: strikes},
            "last_bad": {**state["last_bad"], finding.name: verdict.step},
            "last_cut": verdict.step if cuts else state["last_cut"],
            "spent": state["spent"] + cuts,
        }
        decision = Decision(
            about=idle.about, at=idle.at, optimizer=idle.optimizer, actions=actions, because=(finding.code,)
        )
        return new, decision if actions else idle

    def _strikes(self, state: Mapping[str, Any], finding: Finding) -> int:
        last = state["last_bad"].get(finding.name)
        if last is None or finding.step - last > self.settings.quiet:
            return 1
        return int(state["strikes"].get(finding.name, 0)) + 1


def _first_grave(verdict: Verdict) -> Finding | None:
    """The gravest finding that has a ladder; of equals the first, which is the first cause."""
    treatable = [f for f in verdict.findings if f.name in LADDERS and f.severity >= Severity.ERROR]
    return max(treatable, key=lambda f: f.severity, default=None)
