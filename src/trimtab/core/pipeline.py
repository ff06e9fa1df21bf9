"""sample -> verdict -> decision. The whole brain; it runs the same live, in replay and in tests."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from trimtab.core.config import Config
from trimtab.core.effects import Effects, TakenBack
from trimtab.core.harm import harm_of, is_fixed_objective
from trimtab.core.origin_notes import explained
from trimtab.core.policy import Ladder
from trimtab.core.registry import advice_of, select_rules
from trimtab.core.schedule import RAISED
from trimtab.core.screen import Screen, is_silent_when_calm
from trimtab.core.stats.level import SHORT
from trimtab.core.stats.packed import packed, unpacked
from trimtab.core.stats.trail import Trail, onset_of
from trimtab.core.types import Decision, Finding, Outcome, Policy, Record, Rule, Sample, Severity, Verdict
from trimtab.core.window import Window

log = logging.getLogger("trimtab")
MAX_FACT_SETS = 256
UNKNOWN = -1
NUM_QUIET = 64
Adviser = Callable[[Finding, tuple[str, ...], Window, int], tuple[str, ...]]
"""Makes the advice of a finding from what its rule says, the window, and how many actions were taken so far."""


class Brain:
    """Deterministic in the sequence of samples: replaying a record re-makes the same verdicts and decisions.

    Without an adviser findings carry what their rule's page says, whatever the evidence.
    """

    def __init__(
        self,
        rules: tuple[Rule, ...],
        policy: Policy | None,
        effects: Effects | None = None,
        adviser: Adviser | None = None,
    ) -> None:
        self._rules = rules
        self._adviser = adviser
        self._given: dict[str, tuple[str, ...]] = {}
        self._step = -1  # the newest sample's; before the first nothing counts as over
        self._policy = policy
        self._effects = effects
        self._due: tuple[Outcome, ...] = ()
        self._trail = Trail()  # kept only where there is a policy: it is what a rewind is aimed by
        self._branch, self._onset = 0, UNKNOWN
        self._window = Window()
        self._open: dict[str, dict[str, int]] = {}
        self._policy_state: Mapping[str, Any] = policy.init() if policy is not None else {}
        self._broken: set[str] = set()
        self._advice = {rule.code: advice_of(rule) for rule in rules}
        self._hold: dict[str, int] = {rule.code: getattr(rule, "hold", 1) for rule in rules}
        self._needs = [frozenset(getattr(rule, "needs", ())) for rule in rules]
        self._concerned: dict[tuple[str, ...], tuple[tuple[int, bool, Rule], ...]] = {}
        self.screen = Screen(self._window, rules, self._asked_about)

    @classmethod
    def from_config(cls, config: Config, adviser: Adviser | None = None) -> Brain:
        """The rules a configuration selects; it decides only in mode `act`."""
        rules = select_rules(config)
        if config.mode != "act":
            return cls(rules, None, adviser=adviser)
        return cls(rules, Ladder.from_config(config), Effects(config.policy.effect_after), adviser)

    def advance(self, sample: Sample, *, seen_at: int) -> tuple[Verdict, Decision]:
        """Judge one sample and decide about it."""
        if sample.branch > self._branch:
            self._rewound(sample.branch)
        self._window.look(sample)
        self.screen.expire()
        self._step = sample.step
        raw = self._ask(sample)
        findings = tuple(self._in_incident(f, sample) for f in raw) if raw else ()
        self._window.absorb(alarming=bool(raw) and any(f.severity >= Severity.ERROR for f in findings))
        verdict = Verdict(
            step=sample.step, seen_at=seen_at, findings=findings, optimizer=sample.optimizer, phase=sample.phase
        )
        if self._policy is None:
            return verdict, Decision(about=sample.step, at=seen_at + 1, optimizer=sample.optimizer)
        self._trail.push(sample)
        self._policy_state, decision = self._policy.decide(self._policy_state, self._aimed(verdict, sample))
        self._onset = int(next((a.args["before"] for a in decision.actions if a.kind == "rewind"), self._onset))
        self._due = () if self._effects is None else tuple(self._effects.see(sample))
        return verdict, decision

    def absorb(self, samples: list[Sample]) -> None:
        """Take in steps that the screen let pass: no rule has anything to say about them, and nothing is decided."""
        self._window.absorb_calm(samples)
        self.screen.expire()
        self._step = samples[-1].step

    def _aimed(self, verdict: Verdict, sample: Sample) -> Verdict:
        """The verdict as the policy sees it: with the onset, whether the update was let in, and the harm done."""
        if sample.phase != "train" or not any(f.severity >= Severity.ERROR for f in verdict.findings):
            return verdict
        known, fixed = onset_of(self._trail, sample.step), is_fixed_objective(self._window)
        told = []
        for f in verdict.findings:
            onset = int(min(known, f.evidence.get("onset", known)))
            more = {
                "onset": float(onset),
                "update_applied": float(applied(sample, f)),
                "harm": harm_of(self._trail, onset, fixed=fixed) if "harm" not in f.evidence else f.evidence["harm"],
                "largest_update": self._trail.largest_update(onset),
            }
            told.append(replace(f, evidence={**f.evidence, **more}))
        return replace(verdict, findings=tuple(told))

    def _rewound(self, branch: int) -> None:
        """The first sample after weights were put back: what was seen since the onset is no memory to judge it by.

        Who went back for the sake of another optimizer knows no onset: then only the newest sample is forgotten.
        """
        steps = self._trail.steps
        onset = int(steps[-1]) if self._onset == UNKNOWN and len(steps) else self._onset
        num = int((steps >= onset).sum())
        self._branch = branch
        self._trail.cut(onset)
        go_back(self._window, num)

    def did(self, outcome: Outcome) -> Outcome:
        """Take in what became of an action, to measure its effect from here on; returns the same outcome."""
        if self._effects is not None:
            action = outcome.action
            rewound = outcome.applied and action.kind == "rewind" and not action.args.get("buffers")
            self._effects.watch(outcome, self._taken_back(int(action.args["before"])) if rewound else None)
        return outcome

    def _taken_back(self, onset: int) -> TakenBack:
        """The gradient norms before the onset of trouble and in it; the trail holds logarithms."""
        first = int(np.searchsorted(self._trail.steps, onset))
        norms = self._trail.scalar("grad_norm")
        with np.errstate(all="ignore"):
            quiet = norms[:first][np.isfinite(norms[:first])][-NUM_QUIET:]
            usual = float(np.exp(np.median(quiet))) if quiet.size else math.nan
            return TakenBack(usual, float(np.exp(np.nanmax(norms[first:], initial=-math.inf))))

    def records(self, sample: Sample) -> tuple[Record, ...]:
        """What goes on record of the newest sample: itself, and what it made known of the effect of earlier actions."""
        return (sample, *self._due)

    def _ask(self, sample: Sample) -> list[Finding]:
        """What the rules say that are concerned: those with a fact they wait for, at the steps they look at.

        Samples come with few different sets of facts: who is concerned is found once for each. Most rules cost nothing
        on most steps.
        """
        facts, step = tuple(sample.scalars), sample.step
        concerned = self._concerned.get(facts)
        if concerned is None:
            concerned = tuple(
                (max(int(getattr(rule, "every", 1)), 1), is_silent_when_calm(rule, facts), rule)
                for rule in self._asked_about(facts)
            )
            if len(self._concerned) >= MAX_FACT_SETS:  # a user may name scalars as he likes
                self._concerned.clear()
            self._concerned[facts] = concerned
        found: list[Finding] = []
        calm = self._is_calm(sample)
        for every, silent_when_calm, rule in concerned:
            if (calm and silent_when_calm) or step % every:
                continue
            try:
                found.extend(rule.check(self._window))
            except Exception:
                # A detector that breaks must not take the training run with it: report once, go on without it.
                self._broken.add(rule.code)
                self._concerned.clear()
                self.screen.forget()
                log.exception("rule %s (%s) failed and is switched off for this run", rule.code, rule.name)
        return found

    def _asked_about(self, facts: tuple[str, ...]) -> list[Rule]:
        """The rules that a sample with these facts concerns: those with a fact they wait for, and not broken."""
        return [
            rule
            for rule, need in zip(self._rules, self._needs, strict=True)
            if (not need or not need.isdisjoint(facts)) and rule.code not in self._broken
        ]

    def _is_calm(self, sample: Sample) -> bool:
        """Whether no rule that is silent on ordinary steps can have anything to say about this one."""
        scalars = sample.scalars
        for name, (low, high) in self.screen.bounds.items():
            value = scalars.get(name)
            if value is not None and not low < value < high:
                return False
        return self._window.calm()

    def _in_incident(self, finding: Finding, sample: Sample) -> Finding:
        """Give the finding its place in an incident: the same code at the step before it continues one."""
        known = self._open.get(finding.code)
        hold = self._hold.get(finding.code, 1)
        streak = known["streak"] + 1 if known is not None and sample.step - known["last"] <= hold else 1
        self._open[finding.code] = {"last": sample.step, "streak": streak}
        if streak == 1 or finding.code not in self._given:  # while it lasts, what was said at its onset stands
            self._given[finding.code] = self._advise(finding)
        said = replace(finding, streak=streak, optimizer=sample.optimizer, advice=self._given[finding.code])
        return explained(said, sample.notes)

    def _advise(self, finding: Finding) -> tuple[str, ...]:
        own = finding.advice or self._advice.get(finding.code, ())
        if self._adviser is None:
            return own
        try:
            return self._adviser(finding, own, self._window, int(self._policy_state.get("spent", 0)))
        except Exception:
            log.exception(
                "the advice for %s (%s) could not be weighed: its rule's own is given", finding.code, finding.name
            )
            return own

    def open_incidents(self, step: int) -> tuple[str, ...]:
        """Codes that still fired at `step`, or so shortly before it that the incident is not over."""
        return tuple(code for code, i in self._open.items() if step - i["last"] < self._hold.get(code, 1))

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on exactly here, as plain data."""
        return {
            "window": packed(self._window.state_dict()),
            "open": {code: dict(i) for code, i in self._open.items()},
            "given": [[c, *self._given[c]] for c in self.open_incidents(self._step) if c in self._given],
            "policy": dict(self._policy_state),
            "effects": {} if self._effects is None else self._effects.state_dict(),
            "trail": {} if self._policy is None else self._trail.state_dict(),
            "branch": [self._branch, self._onset],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self._window.load_state_dict(unpacked(state["window"]))
        self.screen.expire()
        self._open = {code: {"last": int(i["last"]), "streak": int(i["streak"])} for code, i in state["open"].items()}
        self._given = {code: tuple(advice) for code, *advice in state.get("given", ())}
        if self._policy is not None:
            self._policy_state = {**self._policy.init(), **state["policy"]}
        if state.get("trail"):
            self._trail = Trail.from_state(state["trail"])
        self._branch, self._onset = (int(v) for v in state.get("branch", (0, UNKNOWN)))
        if self._effects is not None and state.get("effects"):
            self._effects.load_state_dict(state["effects"])


BOUNDED = 0.5
"""A gradient clipped to less than this share of itself did no more than a usual one."""


def applied(sample: Sample, finding: Finding) -> bool:
    """Whether the update of this step got into the weights, and at full size where its size is the trouble."""
    scalars = sample.scalars
    if any(scalars.get(name) for name in ("rejected", "scaler_skipped", "routine_overflow")):
        return False
    if finding.name == "learning-rate" and "highest" in finding.evidence:  # it jumped, but is it in force?
        in_force = finding.evidence.get("lr", 0.0) * scalars.get("lr_multiplier", 1.0)
        return in_force > RAISED * finding.evidence["highest"]
    return finding.name != "exploding-gradient" or scalars.get("clip_coef", 1.0) > BOUNDED


def go_back(window: Window, num: int) -> None:
    """Take the last `num` training samples out of what is remembered of every step.

    The slow histories stay: alarming samples never got into them.
    """
    if num <= 0:
        return
    state = window.state_dict()
    past = state["past"] = state["past"][: max(len(state["past"]) - num, 0)]
    for name, level in state["levels"].items():
        known = [s[name] for s in past if name in s][-SHORT:]
        level["recent"] = known or level["recent"][:1]
    state["drift"] = {"total": 0.0, "onset": -1}
    state["left_out"] = 0
    window.load_state_dict(state)
