"""Each ladder, the severity it needs, cool-down, budget and quiet spell, on hand-made verdicts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from trimtab.core.config import PolicyConfig
from trimtab.core.policy import LADDERS, Ladder
from trimtab.core.types import Action, Decision, Finding, Severity, Verdict

WARN, ERROR, FATAL = Severity.WARN, Severity.ERROR, Severity.FATAL


def finding(name: str, step: int, severity: Severity = ERROR) -> Finding:
    return Finding(code=name.upper(), name=name, step=step, severity=severity, message="")


class Run:
    """A ladder with its state, shown one verdict after the other."""

    def __init__(self, **settings: Any) -> None:
        self.ladder = Ladder(settings=PolicyConfig(**settings))
        self.state: Mapping[str, Any] = self.ladder.init()

    def see(self, step: int, *findings: Finding) -> Decision:
        verdict = Verdict(step=step, seen_at=step, findings=findings, optimizer="gen")
        self.state, decision = self.ladder.decide(self.state, verdict)
        return decision

    def kinds(self, step: int, *findings: Finding) -> list[str]:
        return [a.kind for a in self.see(step, *findings).actions]


def args(action: Action) -> tuple[str, float | None]:
    return action.kind, action.args.get("factor")


CUT = ("cut_lr", 0.1)
BACK = ("rewind", None)
FIRST = {
    "nonfinite-gradient": [("skip", None), ("cut_lr", 0.5)],
    "nonfinite-loss": [("skip", None), ("cut_lr", 0.5)],
    "exploding-gradient": [BACK, CUT],
    "loss-spike": [BACK, CUT],
    "diverging-loss": [BACK, CUT],
    "weight-jump": [BACK, CUT],
    "learning-rate": [CUT],  # a jump of it goes back; one that is 0 or NaN moved nothing
    "update-ratio": [BACK, CUT],
    "weight-corrupted": [BACK],
    "optimizer-state-lost": [BACK],
    "outlier-batch": [BACK, ("skip_data", None)],
    "nonfinite-input": [("skip_data", None)],
    "label-range": [("skip_data", None)],
    "oscillating-loss": [("cut_lr", 0.5)],
    "nonfinite-validation": [("cut_lr", 0.5)],
    "overfitting": [("raise_weight_decay", 1.5)],
    "scale-collapse": [("cut_lr", 0.5)],
    "nonfinite-weight": [BACK],
    "nonfinite-optimizer-state": [BACK],
}
STOPS = dict.fromkeys(FIRST) | {
    "nonfinite-gradient": 50,
    "nonfinite-loss": 50,
    "exploding-gradient": 100,
    "loss-spike": 100,
    "diverging-loss": 100,
    "weight-jump": 100,
    "scale-collapse": 50,
    "nonfinite-weight": 3,
    "nonfinite-optimizer-state": 3,
}


def test_every_ladder_is_tested() -> None:
    assert set(FIRST) == set(STOPS) == set(LADDERS)


@pytest.mark.parametrize("name", FIRST)
def test_the_first_rung(name: str) -> None:
    decision = Run().see(7, finding(name, 7))
    assert [args(a) for a in decision.actions] == FIRST[name]
    assert decision == Decision(about=7, at=8, optimizer="gen", because=(name.upper(),), actions=decision.actions)


@pytest.mark.parametrize("name", STOPS)
def test_where_it_stops(name: str) -> None:
    run = Run()
    stops = [step + 1 for step in range(120) if "stop" in run.kinds(step, finding(name, step))]
    assert (stops[0] if stops else None) == STOPS[name]


def test_a_buffer_gone_bad_was_put_back_and_needs_nothing() -> None:
    run = Run()
    assert [run.kinds(step, finding("nonfinite-buffer", step)) for step in range(60)] == [[]] * 60
    assert run.state == run.ladder.init()


@pytest.mark.parametrize("name", [n for n in FIRST if n != "overfitting"])
def test_a_warning_is_no_reason_to_interfere(name: str) -> None:
    run = Run()
    assert [run.kinds(step, finding(name, step, WARN)) for step in range(120)] == [[]] * 120
    assert run.state["strikes"] == {}  # and does not count towards it


def test_more_weight_decay_may_follow_a_warning() -> None:
    run = Run(cooldown=0)
    assert [run.kinds(i, finding("overfitting", i, WARN)) for i in range(6)] == [
        ["raise_weight_decay"],
        *[[]] * 3,
        ["raise_weight_decay"],
        [],
    ]


def test_the_gravest_is_acted_on_and_of_equals_the_first_cause() -> None:
    first, second = finding("nonfinite-loss", 0), finding("exploding-gradient", 0)
    assert Run().see(0, first, second).because == ("NONFINITE-LOSS",)
    assert Run().see(0, second, first).because == ("EXPLODING-GRADIENT",)
    assert Run().see(0, finding("overfitting", 0, WARN), second).because == ("EXPLODING-GRADIENT",)
    assert Run().see(0, finding("unheard-of", 0, FATAL), second).because == ("EXPLODING-GRADIENT",)
    assert [a.kind for a in Run().see(0, second, finding("nonfinite-weight", 0, FATAL)).actions] == ["rewind"]


def test_strikes_are_kept_per_name_whichever_is_acted_on() -> None:
    run = Run()
    for step in range(3):
        run.see(step, finding("nonfinite-loss", step), finding("nonfinite-gradient", step))
    run.see(3, finding("nonfinite-gradient", 3))
    assert run.state["strikes"] == {"nonfinite-loss": 3, "nonfinite-gradient": 4}
    for step in range(4, 60):  # its fiftieth strike comes while another name is the first cause
        both = step in (48, 49, 50)
        found = run.kinds(
            step, *([finding("exploding-gradient", step)] if both else []), finding("nonfinite-gradient", step)
        )
        assert ("stop" in found) == (step >= 51)


def test_cooldown_is_between_actions_of_one_kind() -> None:
    run = Run(cooldown=20, quiet=3)
    assert run.kinds(0, finding("nonfinite-loss", 0)) == ["skip", "cut_lr"]
    assert run.kinds(10, finding("nonfinite-loss", 10)) == ["skip"]  # new trouble, but too early
    assert run.kinds(10, finding("overfitting", 10, WARN)) == ["raise_weight_decay"]
    assert run.kinds(19, finding("oscillating-loss", 19)) == []
    assert run.kinds(20, finding("diverging-loss", 20)) == ["rewind", "cut_lr"]


def test_budget_counts_every_kind_but_never_holds_back_a_stop() -> None:
    run = Run(budget=2, cooldown=0, quiet=0)
    assert run.kinds(0, finding("nonfinite-loss", 0)) == ["skip", "cut_lr"]
    assert run.kinds(10, finding("overfitting", 10, WARN)) == ["raise_weight_decay"]
    assert run.kinds(20, finding("loss-spike", 20)) == []
    assert run.kinds(30, finding("overfitting", 30, WARN)) == []
    assert run.kinds(40, finding("nonfinite-loss", 40)) == ["skip"]
    assert run.state["spent"] == 2
    run = Run(budget=0)
    assert [run.kinds(i, finding("nonfinite-weight", i, FATAL)) for i in range(3)] == [[], [], ["stop"]]


def test_skips_cost_nothing() -> None:
    run = Run(budget=20)
    for step in range(49):
        run.see(step, finding("nonfinite-loss", step))
    # the cuts at strikes 1 and 25 (the one at 10 fell into the cool-down), and going back at 10 and 25
    assert run.state["spent"] == 4


def test_trouble_after_a_quiet_spell_is_new() -> None:
    run = Run(quiet=100, cooldown=0)
    for step in range(2):
        run.see(step, finding("nonfinite-weight", step, FATAL))
    assert run.kinds(101, finding("nonfinite-weight", 101, FATAL)) == ["stop"]
    run = Run(quiet=100, cooldown=0)
    for step in range(2):
        run.see(step, finding("nonfinite-weight", step, FATAL))
    assert run.kinds(102, finding("nonfinite-weight", 102, FATAL)) == ["rewind"]


def test_the_state_is_plain_data() -> None:
    run = Run()
    run.see(0, finding("nonfinite-loss", 0), finding("nonfinite-gradient", 0))
    run.see(1, finding("overfitting", 1, WARN))
    assert json.loads(json.dumps(run.state)) == run.state


def test_a_healthy_verdict_changes_nothing() -> None:
    run = Run()
    before = run.state
    assert run.see(0) == Decision(about=0, at=1, optimizer="gen")
    assert run.state is before


class TestRewind:
    def see(
        self, run: Run, step: int, name: str = "loss-spike", **evidence: float
    ) -> list[tuple[str, dict[str, float]]]:
        what = Finding(code="X", name=name, step=step, severity=ERROR, message="", evidence=evidence)
        return [(a.kind, dict(a.args)) for a in run.see(step, what).actions]

    def test_it_is_aimed_at_the_onset(self) -> None:
        (back, _) = self.see(Run(), 50, onset=41.0)
        assert back == ("rewind", {"before": 41.0, "back": 0.0, "restart": 0.1, "limit": 1.0})

    def test_what_was_kept_out_of_the_weights_is_not_taken_back(self) -> None:
        assert [k for k, _ in self.see(Run(), 50, "exploding-gradient", update_applied=0.0)] == ["cut_lr"]
        assert [k for k, _ in self.see(Run(), 50, "exploding-gradient", update_applied=1.0)] == ["rewind", "cut_lr"]
        assert [k for k, _ in self.see(Run(), 50, "weight-corrupted", update_applied=0.0)] == ["rewind"]

    def test_only_a_rate_that_jumped_is_a_reason(self) -> None:
        assert [k for k, _ in self.see(Run(), 50, "learning-rate", lr=0.0)] == ["cut_lr"]
        assert [k for k, _ in self.see(Run(), 50, "learning-rate", lr=1.0, highest=0.01)] == ["rewind", "cut_lr"]
        assert self.see(Run(), 50, "update-ratio", update_ratio=1e-7) == []
        assert [k for k, _ in self.see(Run(), 50, "diverging-loss", factor=-1.0)] == ["cut_lr"]

    def test_while_the_cause_lasts_it_is_done_again_at_no_price(self) -> None:
        run = Run()
        seen = [self.see(run, 50 + i) for i in range(4)]
        assert [[k for k, _ in s] for s in seen] == [["rewind", "cut_lr"], ["rewind"], ["rewind"], ["rewind"]]
        assert {s[0][1]["back"] for s in seen} == {0.0}
        assert run.state["spent"] == 2

    def test_when_it_comes_back_it_goes_further_and_the_cut_is_deeper(self) -> None:
        run = Run()
        seen = [self.see(run, 50 + 30 * i) for i in range(5)]
        assert [s[0][1].get("back") for s in seen[:4]] == [0.0, 1.0, 2.0, 3.0]
        assert [dict(s[1][1]) for s in seen[1:4]] == [{"factor": 0.1}] * 3
        assert seen[4] == []  # it did not help: no more of it
        assert self.see(run, 50 + 30 * 5 + 200)[0][1]["back"] == 0.0  # after a quiet spell it is new trouble

    def test_it_does_not_go_on_for_ever(self) -> None:
        run = Run()
        kinds = [[k for k, _ in self.see(run, i)] for i in range(100)]
        assert sum("rewind" in k for k in kinds) == 4 * 9
        assert kinds[-1] == ["stop"]

    def test_damage_and_bad_data_are_no_reason_to_cut_the_rate(self) -> None:
        run = Run()
        spike, outlier = finding("loss-spike", 50), finding("outlier-batch", 50)
        actions = {a.kind: dict(a.args) for a in run.see(50, spike, outlier).actions}
        assert actions["rewind"]["limit"] == 0.0
        assert actions["cut_lr"]["after_rewind"] == 1.0
        assert "skip_data" in actions

    def test_steps_under_way_when_it_went_back_are_not_judged(self) -> None:
        run = Run()
        verdict = Verdict(step=50, seen_at=53, findings=(finding("loss-spike", 50),))
        run.state, decision = run.ladder.decide(run.state, verdict)
        assert decision.actions
        before = run.state
        assert run.kinds(53, finding("loss-spike", 53)) == []
        assert run.state is before
        assert "rewind" in run.kinds(54, finding("loss-spike", 54))
