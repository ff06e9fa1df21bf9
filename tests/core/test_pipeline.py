"""Rules, incidents, policy: the pure brain on hand-made samples."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from trimtab.core.config import Config
from trimtab.core.errors import ConfigError
from trimtab.core.pipeline import Brain
from trimtab.core.registry import advice_of, all_rules, find_rule, select_rules
from trimtab.core.types import FULL_COLUMNS, NORM_COLUMNS, Column, Finding, Kind, Layout, Sample, Severity
from trimtab.core.window import Window

GRADS = Layout(names=("a", "b"), kinds=(Kind.GRAD,) * 2, numel=(4, 4), columns=NORM_COLUMNS)
FULL = Layout(
    names=("a", "b", "a", "b", "bn.mean"),
    kinds=(Kind.GRAD,) * 2 + (Kind.WEIGHT,) * 2 + (Kind.BUFFER,),
    numel=(4,) * 5,
    columns=FULL_COLUMNS,
)


def plain(step: int, **scalars: float) -> Sample:
    norm = scalars.setdefault("grad_norm", 1.0)
    scalars.setdefault("loss", 1.0)
    scalars.setdefault("fixed", 1.0)
    return Sample(step=step, layout=GRADS, table=np.full((2, 1), norm / 1.41421356, np.float32), scalars=scalars)


def looked(step: int, cells: dict[tuple[int, Column], float], **scalars: float) -> Sample:
    table = np.zeros((5, len(FULL_COLUMNS)), np.float32)
    for (row, column), value in cells.items():
        table[row, FULL_COLUMNS.index(column)] = value
    return Sample(step=step, layout=FULL, table=table, scalars={"loss": 1.0, "grad_norm": 1.0, **scalars})


def names(brain: Brain, sample: Sample) -> list[str]:
    return [f.name for f in brain.advance(sample, seen_at=sample.step)[0].findings]


def settled(config: Config | None = None, steps: int = 40, fixed: float = 1.0) -> Brain:
    brain = Brain.from_config(config or Config())
    for i in range(steps):
        assert names(brain, plain(i, grad_norm=1.0 + 0.1 * (i % 3), loss=1.0 + 0.1 * (i % 4), fixed=fixed)) == []
    return brain


def test_nonfinite_loss_and_gradient_first_cause_first() -> None:
    brain = settled()
    bad = looked(40, {(0, Column.NAN): 3}, loss=math.nan, grad_norm=math.nan, nonfinite_grads=1.0, rejected=1.0)
    verdict, _ = brain.advance(bad, seen_at=41)
    assert [f.name for f in verdict.findings] == ["nonfinite-loss", "nonfinite-gradient"]
    assert verdict.seen_at == 41
    gradient = verdict.findings[1]
    assert gradient.subject == ("a",)
    assert gradient.evidence["num_nan"] == 3
    assert "kept out of the weights" in gradient.message
    assert gradient.advice
    assert not gradient.advice[0].startswith("1.")
    assert verdict.worst is verdict.findings[0]
    assert names(brain, plain(41)) == []


def test_scaler_overflow_is_silent() -> None:
    brain = settled()
    assert names(brain, plain(40, grad_norm=math.inf, nonfinite_grads=1.0, routine_overflow=1.0, scale=65536.0)) == []


def test_nonfinite_gradient_without_counts_is_named_by_its_norm() -> None:
    sample = plain(0, grad_norm=math.inf, nonfinite_grads=1.0)
    sample.table[:] = [[math.inf], [1.0]]
    verdict, _ = Brain.from_config(Config()).advance(sample, seen_at=0)
    assert verdict.findings[0].subject == ("a",)


def test_nonfinite_weight_is_fatal_and_named() -> None:
    verdict, _ = settled().advance(looked(40, {(3, Column.INF): 1}), seen_at=40)
    finding = verdict.findings[0]
    assert (finding.name, finding.severity, finding.subject) == ("nonfinite-weight", Severity.FATAL, ("b",))


def test_nonfinite_buffer_is_told_unless_a_rejection_explains_it() -> None:
    cells = {(4, Column.INF): 1.0}
    finding = settled().advance(looked(40, cells, bad_buffers=1.0, buffers_restored=1.0), seen_at=40)[0].findings[0]
    assert finding.name == "nonfinite-buffer"
    assert finding.subject == ("bn.mean",)
    assert "put back" in finding.message
    quiet = looked(40, cells, bad_buffers=1.0, rejected=1.0, nonfinite_grads=1.0)
    assert names(settled(), quiet) == ["nonfinite-gradient"]


def test_exploding_gradient_is_relative_and_names_the_layer() -> None:
    brain = settled()
    sample = plain(40, grad_norm=50.0, clip_coef=0.02)
    sample.table[:] = [[0.8], [50.0]]
    verdict, _ = brain.advance(sample, seen_at=40)
    finding = verdict.findings[0]
    assert finding.name == "exploding-gradient"
    assert finding.subject[0] == "b"
    assert "clipped to 1" in finding.message
    assert names(settled(), plain(40, grad_norm=5.0)) == []
    early = Brain.from_config(Config())
    assert names(early, plain(0, grad_norm=1e-3)) == []
    assert names(early, plain(1, grad_norm=1e3)) == []


def test_loss_spike_needs_to_pass_the_start_as_well() -> None:
    assert names(settled(), plain(40, loss=30.0)) == ["loss-spike"]
    brain = Brain.from_config(Config())
    for i in range(100):
        names(brain, plain(i, loss=2.3 * 0.9**i + 1e-4))
    assert names(brain, plain(100, loss=1.5)) == []  # a hard sample, still below where the run began
    assert names(brain, plain(101, loss=20.0)) == ["loss-spike"]


def test_one_incident_is_one_streak() -> None:
    brain = settled()
    streaks = []
    for i in range(40, 45):
        verdict, _ = brain.advance(plain(i, loss=math.nan), seen_at=i)
        streaks.append(verdict.findings[0].streak)
    assert streaks == [1, 2, 3, 4, 5]
    assert brain.open_incidents(44) == ("LOSS001",)
    brain.advance(plain(45), seen_at=45)
    assert brain.open_incidents(45) == ()
    assert brain.advance(plain(46, loss=math.inf), seen_at=46)[0].findings[0].streak == 1


def test_act_mode_cuts_with_cooldown_and_stops_in_the_end() -> None:
    brain = settled(Config(mode="act"))
    kinds = []
    for i in range(40, 95):
        _, decision = brain.advance(plain(i, loss=math.nan, nonfinite_grads=1.0), seen_at=i)
        kinds.append([a.kind for a in decision.actions])
    assert kinds[0] == ["skip", "cut_lr"]
    assert kinds[1] == ["skip"]
    assert kinds[8] == ["skip"]
    assert kinds[9] == ["rewind", "skip"]  # a cut is due as well, but the cool-down of 20 steps holds it back
    assert [k for k in kinds[10:24] if k != ["skip"]] == []
    assert kinds[24] == ["rewind", "skip", "cut_lr"]
    assert kinds[49] == ["stop"]


def test_explosion_cuts_to_a_tenth() -> None:
    brain = settled(Config(mode="act"))
    _, decision = brain.advance(plain(40, grad_norm=1e4), seen_at=41)
    assert decision.at == 42
    assert decision.because == ("GRAD002",)
    assert [(a.kind, dict(a.args)) for a in decision.actions] == [
        ("rewind", {"before": 40.0, "back": 0.0, "restart": 0.1, "limit": 1.0}),
        ("cut_lr", {"factor": 0.1, "after_rewind": 0.5}),
    ]


def test_a_single_burst_of_an_objective_that_may_move_is_told_and_nothing_is_done() -> None:
    brain = settled(Config(mode="act"), fixed=0.0)
    verdict, decision = brain.advance(plain(40, grad_norm=1e4, fixed=0.0), seen_at=41)
    assert [f.name for f in verdict.findings] == ["exploding-gradient"]
    assert decision.actions == ()


def test_gradients_that_leave_their_range_and_stay_are_harm() -> None:
    brain = settled(Config(mode="act"), fixed=0.0)
    decisions = [brain.advance(plain(i, grad_norm=1e4, fixed=0.0), seen_at=i)[1] for i in range(40, 56)]
    acted = [d.about for d in decisions if any(a.kind == "rewind" for a in d.actions)]
    assert acted[:1] == [47]


def test_a_loss_that_rises_alone_is_no_reason_to_do_anything() -> None:
    brain = Brain.from_config(Config(mode="act"))
    found = set()
    for i in range(300):
        loss = max(1.0 - 0.01 * i, 0.1) if i < 100 else 0.1 + 0.1 * (i - 100)
        verdict, decision = brain.advance(plain(i, loss=loss + 0.01 * (i % 3)), seen_at=i)
        found |= {f.name for f in verdict.findings}
        assert decision.actions == ()
    assert found == {"diverging-loss"}


def test_budget_and_quiet_spell() -> None:
    config = Config.from_dict({"mode": "act", "policy": {"budget": 1, "cooldown": 0, "quiet": 10}})
    brain = settled(config)
    first = brain.advance(plain(40, loss=math.nan), seen_at=40)[1]
    later = brain.advance(plain(80, loss=math.nan), seen_at=80)[1]
    assert [a.kind for a in first.actions] == ["skip", "cut_lr"]
    assert [a.kind for a in later.actions] == ["skip"]


def test_other_modes_never_decide() -> None:
    for mode in ("observe", "advise", "raise"):
        assert settled(Config(mode=mode)).advance(plain(40, loss=math.nan), seen_at=40)[1].actions == ()


def test_state_round_trips_exactly() -> None:
    config = Config(mode="act")
    one, two = settled(config), Brain.from_config(config)
    one.advance(plain(40, loss=math.nan), seen_at=40)
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for i in range(41, 60):
        sample = plain(i, loss=math.nan if i % 7 == 0 else 1.0, grad_norm=30.0 if i == 50 else 1.0)
        assert one.advance(sample, seen_at=i) == two.advance(sample, seen_at=i)
    assert one.state_dict() == two.state_dict()


def test_selecting_ignoring_and_regrading() -> None:
    family = [r.code for r in select_rules(Config(select=("LOSS",)))]
    assert {"LOSS001", "LOSS002"} <= set(family)
    assert all(code.startswith("LOSS") for code in family)
    assert "GRAD002" not in [r.code for r in select_rules(Config(ignore=("exploding-gradient",)))]
    config = Config.from_dict({"severity": {"GRAD": "warn"}, "rules": {"GRAD002": {"ratio": 99.0}}})
    rules = {r.code: r for r in select_rules(config)}
    assert rules["GRAD001"].severity is rules["GRAD002"].severity is Severity.WARN
    assert rules["GRAD002"].ratio == 99.0  # type: ignore[attr-defined]
    assert rules["LOSS001"].severity is Severity.ERROR
    with pytest.raises(ConfigError, match="did you mean 'GRAD001'"):
        select_rules(Config(select=("GRAD01",)))
    with pytest.raises(ConfigError, match="did you mean 'ratio'"):
        select_rules(Config.from_dict({"rules": {"GRAD002": {"rato": 1}}}))
    with pytest.raises(ConfigError, match="it has"):
        select_rules(Config.from_dict({"rules": {"GRAD002": {"qqq": 1}}}))


def test_find_rule() -> None:
    assert find_rule("grad001") is find_rule("nonfinite_gradient") is find_rule("nonfinite-gradient")
    with pytest.raises(ConfigError, match="did you mean 'loss-spike'"):
        find_rule("loss-spke")
    with pytest.raises(ConfigError, match="trimtab rules"):
        find_rule("???")


@dataclass(frozen=True, slots=True, kw_only=True)
class Breaks:
    """Breaks."""

    code: ClassVar[str] = "TEST001"
    name: ClassVar[str] = "breaks"
    severity: Severity = Severity.WARN

    def check(self, window: Window) -> Iterator[Finding]:
        raise ZeroDivisionError
        yield


def test_a_rule_that_breaks_is_switched_off_and_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    brain = Brain((Breaks(), *select_rules(Config())), None)
    with caplog.at_level(logging.ERROR, "trimtab"):
        assert names(brain, plain(0)) == []
        assert names(brain, plain(1, loss=math.nan)) == ["nonfinite-loss"]
    assert len(caplog.records) == 1
    assert advice_of(Breaks()) == ()


def test_severity_reads_words_and_numbers() -> None:
    assert Severity.parse("Error") is Severity.parse(2) is Severity.parse(Severity.ERROR) is Severity.ERROR
    with pytest.raises(ValueError, match="none of"):
        Severity.parse("x")


def test_every_rule_is_documented_and_unique() -> None:
    codes = [r.code for r in all_rules()]
    assert len(set(codes)) == len(codes)
    for rule in all_rules():
        assert rule.__doc__ is not None
        for heading in ("## What it sees", "## Why it matters", "## What to try"):
            assert heading in rule.__doc__, rule
        assert advice_of(rule), rule
