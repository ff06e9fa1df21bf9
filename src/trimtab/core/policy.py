"""The default policy: for each kind of trouble a ladder, climbed while the trouble lasts, left when it ends; whether to
go back, how far, and when going back has to be given up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.core.config import Config, PolicyConfig
from trimtab.core.types import Action, Decision, Finding, Severity, Verdict

SKIP = Action(kind="skip")
STOP = Action(kind="stop")
REWIND = Action(kind="rewind")
SKIP_DATA = Action(kind="skip_data")


def _cut(factor: float) -> Action:
    return Action(kind="cut_lr", args={"factor": factor})


def _explosion_cut() -> Action:
    """To a tenth; where the weights were put back to before the trouble, to a half."""
    return Action(kind="cut_lr", args={"factor": 0.1, "after_rewind": 0.5})


def _decay(factor: float) -> Action:
    return Action(kind="raise_weight_decay", args={"factor": factor})


Rungs = tuple[tuple[int, tuple[Action, ...]], ...]

# (strike, what is done at that strike). A strike is one bad step; the count starts again after a quiet spell. When a
# rewind is due is no matter of strikes: see core/policy.py. It stands here to show which troubles have it.
_NONFINITE: Rungs = (
    (1, (SKIP, _cut(0.5))),
    (2, (SKIP,)),
    (10, (SKIP, REWIND, _cut(0.5))),  # so often, each time on other data: the weights may be the trouble
    (25, (SKIP, REWIND, _cut(0.5))),
    (50, (STOP,)),
)
_EXPLOSION: Rungs = ((1, (REWIND, _explosion_cut())), (20, (REWIND, _cut(0.1))), (100, (STOP,)))
# A rate can be put right: no reason to stop.
_TOO_FAST: Rungs = ((1, (REWIND, _explosion_cut())), (20, (REWIND, _cut(0.1))))
_DAMAGED: Rungs = ((1, (REWIND,)),)  # the rate is not to blame
_LOST: Rungs = ((1, (REWIND,)), (3, (STOP,)))  # three, so that one odd reading ends no run
LADDERS: Mapping[str, Rungs] = {
    "nonfinite-gradient": _NONFINITE,
    "nonfinite-loss": _NONFINITE,
    "exploding-gradient": _EXPLOSION,
    "loss-spike": _EXPLOSION,
    "diverging-loss": _EXPLOSION,
    "weight-jump": _EXPLOSION,
    "learning-rate": _TOO_FAST,
    "update-ratio": _TOO_FAST,
    "weight-corrupted": _DAMAGED,
    "optimizer-state-lost": _DAMAGED,
    "outlier-batch": ((1, (REWIND, SKIP_DATA)),),
    "nonfinite-input": ((1, (SKIP_DATA,)),),
    "label-range": ((1, (SKIP_DATA,)),),
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
NEEDS_HARM = frozenset(
    {"exploding-gradient", "loss-spike", "diverging-loss", "weight-jump", "learning-rate", "update-ratio"}
)
"""What these tell of may be meant, or a moving objective: nothing is done unless weights or gradients show harm."""
FREE = frozenset({"skip", "stop", "skip_data"})
"""These know neither cool-down nor budget: a skip was done inside the step and only goes on record, a stop ends it, and
every bad batch is put aside."""
BLAMELESS = frozenset({"weight-corrupted", "optimizer-state-lost", "outlier-batch", "nonfinite-input", "label-range"})
"""Where one of these is found the rate is not the cause, and stays."""


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
        return {"strikes": {}, "last_bad": {}, "last_done": {}, "spent": 0, "rewound": {}}

    def decide(self, state: Mapping[str, Any], verdict: Verdict) -> tuple[Mapping[str, Any], Decision]:
        """What to do about a verdict, and the state to decide the next one with."""
        idle = Decision(about=verdict.step, at=verdict.seen_at + 1, optimizer=verdict.optimizer)
        treatable = [f for f in verdict.findings if _allowed(f)]
        if not treatable or verdict.step < state["rewound"].get("at", 0):
            return state, idle  # of steps that were under way when it was gone back nothing is left
        # The gravest is acted on; of equals the first, which is the first cause.
        finding = max(treatable, key=lambda f: (f.severity, _priced(f)))
        struck = {f.name: self._strikes(state, f) for f in treatable}
        new = {
            "strikes": {**state["strikes"], **struck},
            "last_bad": {**state["last_bad"], **dict.fromkeys(struck, verdict.step)},
            "last_done": dict(state["last_done"]),
            "spent": int(state["spent"]),
            "rewound": state["rewound"],
        }
        due = self._due(finding, struck[finding.name])
        actions = [] if STOP in due else self._rewind(new, verdict, culprits(treatable, struck))
        again = bool(actions) and new["rewound"]["repeats"] > 0
        deeper = bool(actions) and not again and new["rewound"]["back"] > 0
        blameless = any(f.name in BLAMELESS for f in treatable)
        for action in due:
            if action.kind == "cut_lr" and (again or deeper):
                continue
            if action.kind == "cut_lr" and blameless and "after_rewind" in action.args:
                action = Action(kind="cut_lr", args={**action.args, "after_rewind": 1.0})
            if action.kind in FREE or self._affords(new, action, verdict.step):
                actions.append(action)
        if deeper and not blameless and self._affords(new, _cut(0.1), verdict.step, cooldown=False):
            actions.append(_cut(0.1))
        actions += [SKIP_DATA for f in treatable if f is not finding and SKIP_DATA in LADDERS[f.name][0][1]][:1]
        if not actions:
            return new, idle
        return new, Decision(
            about=idle.about, at=idle.at, optimizer=idle.optimizer, actions=tuple(actions), because=(finding.code,)
        )

    def _rewind(self, state: dict[str, Any], verdict: Verdict, found: list[Finding]) -> list[Action]:
        """The rewind that is due, if one is; its place in the incident goes into the state."""
        due = next_rewind(state["rewound"], verdict, found, quiet=self.settings.quiet) if found else None
        if due is None or (not due[2] and not self._affords(state, REWIND, verdict.step, cooldown=False)):
            return []
        state["rewound"], action, again = due
        innocent = any(f.name in BLAMELESS for f in verdict.findings)
        rewind = Action(kind="rewind", args={**action.args, "limit": 0.0 if innocent else 1.0})
        if action.args.get("buffers") or not self.settings.trial_steps:
            return [rewind]
        how = {"steps": float(self.settings.trial_steps), "again": float(again)}
        return [rewind, Action(kind="trials", args={**how, **{n: action.args[n] for n in ("before", "back")}})]

    def _affords(self, state: dict[str, Any], action: Action, step: int, *, cooldown: bool = True) -> bool:
        """Whether cool-down and budget allow it; if so it is paid for."""
        last = state["last_done"].get(action.kind)
        waits = cooldown and last is not None and step - last < self.settings.cooldown
        if waits or state["spent"] >= self.settings.budget:
            return False
        state["last_done"][action.kind] = step
        state["spent"] += 1
        return True

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
        return tuple(a for a in rung if a is not REWIND and _may(a, finding.severity) and (a.kind in FREE or fresh))


def _priced(finding: Finding) -> bool:
    """Whether its ladder holds more than going back and putting data aside, which are done whoever is acted on."""
    return any(a is not REWIND and a is not SKIP_DATA for _, actions in LADDERS[finding.name] for a in actions)


def _may(action: Action, severity: Severity) -> bool:
    return severity >= Severity.ERROR or action.kind in GENTLE


def remedies_for(finding: Finding) -> frozenset[str]:
    """The kinds of action that mode `act` has for a finding."""
    if not _allowed(finding):
        return frozenset()
    return frozenset(a.kind for _, actions in LADDERS[finding.name] for a in actions if _may(a, finding.severity))


def _allowed(finding: Finding) -> bool:
    """Whether the finding's ladder holds anything that its severity allows."""
    if finding.name == "update-ratio" and finding.evidence.get("update_ratio", 1.0) < SMALL_UPDATE:
        return False  # too small: no cut would fix that
    if finding.name in NEEDS_HARM and finding.evidence.get("harm", math.inf) < 1.0:
        return False
    return any(_may(a, finding.severity) for _, actions in LADDERS.get(finding.name, ()) for a in actions)


SETTLE = 5
"""Trouble this soon after a rewind is what made it necessary, still going on: the same is done again, at no price."""
REPEATS = 8
MAX_BACK = 3
UNDOABLE = frozenset(
    {
        "exploding-gradient",
        "loss-spike",
        "diverging-loss",
        "weight-jump",
        "learning-rate",
        "update-ratio",
        "weight-corrupted",
        "optimizer-state-lost",
        "outlier-batch",
        "nonfinite-weight",
        "nonfinite-optimizer-state",
    }
)
STUBBORN = frozenset({"nonfinite-gradient", "nonfinite-loss"})
"""Kept out inside the step: nothing to take back, unless one batch after the other gives it."""
STUBBORN_AT = (10, 25)
USUAL_UPDATE = 0.03
"""By how much of their size the first steps of a sound run change the weights, at most."""
MOST_RESTART, LEAST_RESTART = 0.1, 1e-3
SMALL_UPDATE = 0.01
"""Below this the finding `update-ratio` says that updates are too small."""
BEFORE_THE_STEP = frozenset(
    {"weight-corrupted", "optimizer-state-lost", "nonfinite-weight", "nonfinite-optimizer-state"}
)
"""Damage that is there whether or not this step's update was let through."""


def harmless(finding: Finding) -> bool:
    """Whether an odd batch went by without a trace in the weights: only averages over batches have taken it in."""
    return finding.name == "outlier-batch" and finding.evidence.get("harm", math.inf) <= 1.0


def culprits(findings: Iterable[Finding], strikes: Mapping[str, int]) -> list[Finding]:
    """The findings that say that weights or state were damaged, so that going back can help."""
    return [f for f in findings if f.severity >= Severity.ERROR and _damaged(f, strikes.get(f.name, 1))]


def _damaged(finding: Finding, strikes: int) -> bool:
    evidence = finding.evidence
    if finding.name in STUBBORN:
        return strikes in STUBBORN_AT
    if finding.name not in UNDOABLE or "factor" in evidence:  # a loss with the wrong sign was never right
        return False
    if finding.name not in BEFORE_THE_STEP and not evidence.get("update_applied", 1.0):
        return False
    if finding.name == "learning-rate":
        return "highest" in evidence  # it jumped; a rate of 0 or NaN moved nothing
    return True


def _restart_factor(found: Iterable[Finding]) -> float:
    """What the rate is to be multiplied with if the run has to begin again: a step then moves the weights as usual."""
    largest = max((max(f.evidence.get(n, 0.0) for n in ("update_ratio", "largest_update")) for f in found), default=0.0)
    return min(MOST_RESTART, max(USUAL_UPDATE / largest, LEAST_RESTART)) if largest > 0 else MOST_RESTART


def next_rewind(
    state: Mapping[str, Any], verdict: Verdict, found: list[Finding], *, quiet: int
) -> tuple[Mapping[str, Any], Action, bool] | None:
    """The state after it, the action, and whether it only repeats the last one; None where nothing more can be won.

    The first time in a quiet run it goes to the newest good snapshot before the onset; each time trouble comes back one
    further. `onset` in the evidence is what the trail says. Where the weights are unharmed only buffers go back, and
    it is no attempt that counts.
    """
    if all(map(harmless, found)):
        onset = min(int(f.evidence.get("onset", verdict.step)) for f in found)
        kept = {"step": state.get("step"), "at": state.get("at", 0), "back": state.get("back", 0), "repeats": 0}
        return kept, Action(kind="rewind", args={"before": float(onset), "buffers": 1.0}), True
    found = [f for f in found if not harmless(f)]
    last = state.get("step")
    since = math.inf if last is None else verdict.step - last
    back, repeats = int(state.get("back", 0)), int(state.get("repeats", 0))
    again = since <= SETTLE and repeats < REPEATS
    if again:
        repeats += 1
    elif since <= quiet:
        back, repeats = back + 1, 0
    else:
        back, repeats = 0, 0
    if back > MAX_BACK:
        return None
    before = min(int(f.evidence.get("onset", verdict.step)) for f in found)
    args = {"before": float(before), "back": float(back), "restart": _restart_factor(found)}
    new = {"step": verdict.step, "at": verdict.seen_at + 1, "back": back, "repeats": repeats}
    return new, Action(kind="rewind", args=args), again
