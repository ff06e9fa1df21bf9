"""A drill puts real faults into a training, and counts honestly what was said about them."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.drill import targets
from trimtab.core.errors import InputError
from trimtab.core.registry import all_rules
from trimtab.doctor.target import check_target
from trimtab.drill.faults import FAULTS, GROUPS, choose, fairly
from trimtab.drill.page import to_html
from trimtab.drill.score import (
    FOUND,
    MISSED,
    NA,
    NOT_RUN,
    OTHERWISE,
    Alarm,
    Report,
    Result,
    Row,
    Task,
    harm_of,
    judge,
    score,
)
from trimtab.drill.session import drill
from trimtab.drill.trial import Run, added_cost
from trimtab.drill.worker import Child, answer, build

HERE = str(Path(__file__).with_name("targets.py"))  # a child begins wherever this process is
SHORT = Task(target=f"{HERE}:build", num_steps=50, onset=25)


def train(fault: str = "", target: str = "build", **changes: Any) -> Result:
    task = replace(SHORT, target=f"{HERE}:{target}", fault=fault, **changes)
    return Run(build(task), task, FAULTS[fault] if fault else None).train()


@cache
def clean_of(target: str = "build") -> Result:
    clean = train(target=target)
    assert clean.alarms == ()
    return clean


def row_of(fault: str, target: str = "build") -> Row:
    clean = clean_of(target)
    return judge(FAULTS[fault], 0, SHORT.onset, clean, train(fault, target, steps_itself=clean.steps_itself))


# ---------------------------------------------------------------------------------------------------- the catalogue


def test_the_catalogue_is_complete() -> None:
    assert len(FAULTS) >= 40
    assert set(GROUPS) == {"data", "numerics", "dynamics", "wiring", "state", "amp"}
    known = {rule.name for rule in all_rules()}
    for one in FAULTS.values():
        assert one.what.endswith(".")
        assert one.names
        assert set(one.names) <= known, one.name


def test_faults_are_chosen_by_name_or_group_and_in_turn() -> None:
    chosen = choose(["amp", "bit-flip"], ["scale-collapses"])
    assert {one.name for one in chosen} == {"bit-flip", "clip-before-unscale"}
    assert [one.group for one in fairly(choose())][:3] == ["data", "numerics", "state"]
    with pytest.raises(InputError, match="did you mean 'bit-flip'"):
        choose(["bitflip"])
    with pytest.raises(InputError, match="no fault is left"):
        choose(["amp"], ["amp"])


# ----------------------------------------------------------------------------------------------------------- a run


@pytest.mark.parametrize(
    ("fault", "by", "latest"),
    [
        ("nan-in-inputs", "nonfinite-input", 0),
        ("inf-in-gradient", "nonfinite-gradient", 0),
        ("bit-flip", "weight-corrupted", 0),
        ("rate-300x", "learning-rate", 0),
        ("stepped-twice", "double-step", 2),
        ("zero-grad-forgotten", "stale-gradient", 24),
        ("accumulation-not-divided", "accumulation-not-divided", 3),
        ("exception-in-step", "step-exception", 0),
    ],
)
def test_a_fault_is_real_harmful_and_found(fault: str, by: str, latest: int) -> None:
    row = row_of(fault)
    assert (row.status, row.by, row.harmful) == (FOUND, by, True)
    assert row.latency is not None
    assert row.latency <= latest


@pytest.mark.parametrize("fault", ["zero-grad-forgotten", "rate-300x", "nan-in-weight", "ema-poisoned"])
def test_a_loop_that_steps_by_itself_is_drilled_too(fault: str) -> None:
    assert (row := row_of(fault, "by_itself")).status == FOUND, row


def test_what_lies_between_backward_and_step_of_others_is_out_of_reach() -> None:
    row = row_of("nan-in-loss", "by_itself")
    assert row.status == NA
    assert "step_fn runs backward" in row.reason
    assert row_of("nan-in-loss", "loss_only").status == FOUND


@pytest.mark.parametrize("target", ["build", "by_itself", "loss_only"])
@pytest.mark.parametrize("guarded", [True, False])
def test_nobody_steps_twice_and_a_guard_that_observes_changes_nothing(target: str, guarded: bool) -> None:
    task = replace(SHORT, target=f"{HERE}:{target}", num_steps=8, onset=4, guarded=guarded)
    run = Run(build(task), task)
    result = run.train()
    assert {int(state["step"]) for state in run.optimizers[0].state.values()} == {8}
    assert result.steps_itself == (target == "by_itself")
    assert result.losses == train(target=target, num_steps=8, onset=4, guarded=not guarded).losses
    assert torch.autograd.backward.__module__ == "torch.autograd"


def test_a_fault_does_not_touch_the_data_that_are_stored() -> None:
    given = check_target(targets.build())
    before = [(x.clone(), y.clone()) for x, y in given.loader]
    for name in ("nan-in-inputs", "label-out-of-range", "inputs-thousandfold"):
        Run(given, replace(SHORT, num_steps=3, onset=1), FAULTS[name]).train()
    assert all(torch.equal(x, u) and torch.equal(y, v) for (x, y), (u, v) in zip(before, given.loader, strict=True))


@pytest.mark.parametrize(("fault", "by"), [("scale-collapses", "scale-collapse"), ("clip-before-unscale", "clip-")])
def test_faults_of_a_scaler_need_one(fault: str, by: str) -> None:
    row = row_of(fault, "scaled")
    assert row.status == FOUND
    assert row.by.startswith(by)
    assert row_of(fault).reason == "the target has no scaler"


def test_a_rate_is_changed_behind_the_back_of_its_schedule() -> None:
    given = targets.build()
    given["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(given["optimizer"], 0.9)
    run = Run(check_target(given), replace(SHORT, num_steps=10, onset=2), FAULTS["rate-30x"])
    run.train()
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(5e-3 * 0.9**10)


# ----------------------------------------------------------------------------------------------------------- scoring


def alarm(name: str, step: int) -> Alarm:
    return Alarm(code="X001", name=name, step=step, said_at=step, severity="warn", message="so it is")


CLEAN = Result(losses=(4.0, 3.0, 2.0, 1.0), mark="a")


@pytest.mark.parametrize(
    ("run", "status", "harmful"),
    [
        (replace(CLEAN), MISSED, False),
        (replace(CLEAN, losses=(4.0, 3.0, 2.0, 2.0)), MISSED, True),
        (replace(CLEAN, losses=(4.0, 3.0, 2.0, 0.9)), MISSED, False),
        (replace(CLEAN, losses=(4.0, 3.0, 2.0, math.nan)), MISSED, True),
        (replace(CLEAN, nonfinite=("buffers",)), MISSED, True),
        (replace(CLEAN, error="ValueError: no", losses=(4.0, 3.0)), MISSED, True),
        (replace(CLEAN, alarms=(alarm("weight-jump", 2),)), FOUND, False),
        (replace(CLEAN, alarms=(alarm("weight-jump", 1),)), MISSED, False),
        (replace(CLEAN, alarms=(alarm("eval-mode", 3), alarm("weight-jump", 3))), FOUND, False),
        (replace(CLEAN, alarms=(alarm("eval-mode", 3),)), OTHERWISE, False),
        (Result(reason="no place"), NA, False),
        (Result(could_not="stopped after 3 s"), NOT_RUN, False),
    ],
)
def test_a_run_is_judged_by_the_clean_one(run: Result, status: str, harmful: bool) -> None:
    row = judge(FAULTS["rate-30x"], 0, 2, CLEAN, run)
    assert (row.status, row.harmful) == (status, harmful)


def test_what_the_loss_does_not_show_is_harm_where_the_run_is_another() -> None:
    other = replace(CLEAN, mark="b")
    row = judge(FAULTS["stepped-twice"], 0, 2, CLEAN, other)
    assert row.harmful
    assert row.hidden
    assert not judge(FAULTS["rate-30x"], 0, 2, CLEAN, other).harmful
    assert not judge(FAULTS["stepped-twice"], 0, 2, CLEAN, CLEAN).harmful
    assert harm_of(replace(CLEAN, nonfinite=("buffers",)), replace(CLEAN, nonfinite=("buffers",)), 2).text.startswith(
        "nothing"
    )


def test_an_alarm_of_the_clean_run_finds_no_fault() -> None:
    noisy = replace(CLEAN, alarms=(alarm("weight-jump", 3),))
    assert judge(FAULTS["rate-30x"], 0, 2, noisy, noisy).status == MISSED


def row(status: str, harmful: bool, latency: int | None = None, **more: Any) -> Row:
    head = {"fault": "bit-flip", "group": "numerics", "what": "A bit <b>flips</b>.", "seed": 0, "harm": "loss 9"}
    return Row(status=status, harmful=harmful, latency=latency, **{**head, **more})


REPORT = Report(
    target="a:b", mode="observe", num_steps=120, onset=40, seeds=(0,), false_alarms=(), clean_steps=120, clean_end=0.1,
    cost_percent=3.14, noise_percent=1.0, step_ms=10.0, cpu_time=False, cost_reason="", seconds=1.0,
    rows=(
        row(FOUND, True, 1, by="weight-corrupted"), row(FOUND, True, 3, by="weight-jump"), row(MISSED, True),
        row(OTHERWISE, False, 9, by="eval-mode"), row(NA, False, reason="no place"), row(NOT_RUN, False, reason="late"),
    ),
)  # fmt: skip


def test_recall_counts_what_ran_and_the_sentence_says_it() -> None:
    got = score(REPORT.rows)
    assert (got.num_found, got.num_faults, got.found_harmful, got.num_harmful) == (2, 4, 2, 3)
    assert (got.num_harmless, got.num_not_applicable, got.num_not_run) == (1, 1, 1)
    assert REPORT.sentence == (
        "Found 2 of 3 harmful faults; median 2 steps after onset; 0 false alarms in 120 clean steps; "
        "cost 3.1 % of a step"
    )
    assert not REPORT.holds()
    assert REPORT.holds(0.5)
    assert not replace(REPORT, false_alarms=(alarm("eval-mode", 3),)).holds(0.5)


def test_the_page_stands_alone_and_is_safe() -> None:
    page = to_html(replace(REPORT, target="<script>x</script>"))
    assert "<script" not in page
    assert "http" not in page.replace("http-equiv", "")
    assert "A bit &lt;b&gt;flips&lt;/b&gt;." in page
    assert "MISSED (said: eval-mode)" in page
    assert "prefers-color-scheme: dark" in page
    assert "no place" in page


# --------------------------------------------------------------------------------------------------------- children


def test_a_child_survives_prints_crashes_and_overruns() -> None:
    with Child() as child:
        good = child.ask(replace(SHORT, target=f"{HERE}:talks", num_steps=3, onset=1), 300)
        assert len(good.losses) == 3
        dead = child.ask(replace(SHORT, target=f"{HERE}:dies"), 300)
        assert "ended with code 7" in dead.could_not
        late = child.ask(replace(SHORT, target=f"{HERE}:hangs"), 0.5)
        assert late.could_not.startswith("stopped after")
        assert child._process is None


def test_a_target_that_builds_nothing_new_is_seen() -> None:
    kept: list[Any] = []
    task = replace(SHORT, target="tests.drill.targets:same_again", num_steps=3, onset=1)
    assert not answer(task, kept).reused
    assert answer(task, kept).reused
    assert answer(replace(task, cost=True), []).reused


def test_the_cost_is_a_ratio_of_two_runs_in_turn() -> None:
    result = answer(replace(SHORT, cost=True, num_steps=6), [])
    assert result.cost_percent is None or result.cost_percent > 0
    assert result.noise_percent is not None
    assert result.step_ms is not None
    assert result.step_ms > 0


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), min_size=5, max_size=80))
def test_a_cost_is_never_zero_or_less(pairs: list[tuple[float, float]]) -> None:
    percent, noise = added_cost([a for a, _ in pairs], [b for _, b in pairs])
    assert percent is None or percent > 0
    assert noise >= 0


def test_noise_without_a_guard_is_hardly_ever_called_a_cost() -> None:
    rng = np.random.default_rng(0)
    shown = 0
    for _ in range(400):
        a, b = np.exp(rng.normal(0, 0.3, (2, 60))) * rng.choice([1.0, 5.0], (2, 60), p=[0.9, 0.1])
        shown += added_cost(list(a), list(b))[0] is not None
    assert shown <= 20  # one in forty is what the interval allows


def test_a_real_cost_is_told_through_noise() -> None:
    rng = np.random.default_rng(0)
    shared = np.exp(rng.normal(0, 0.3, 60))
    percent, _ = added_cost(list(shared), list(1.2 * shared * np.exp(rng.normal(0, 0.02, 60))))
    assert percent == pytest.approx(20, abs=3)


def test_a_cost_that_cannot_be_seen_is_said_to_be_so() -> None:
    noisy = replace(REPORT, cost_percent=None, noise_percent=66.0)
    assert noisy.sentence.endswith("clean steps; cost not measurable")
    assert noisy.cost == "not measurable: the noise is 66 % of a step of 10 ms"
    assert "not measurable: the noise is 66 %" in to_html(noisy)
    unknown = replace(REPORT, cost_percent=None, noise_percent=None, step_ms=None, cost_reason="no time was left")
    assert unknown.sentence.endswith("clean steps")
    assert unknown.cost == "not measured (no time was left)"


def test_a_training_that_does_not_run_by_itself_cannot_be_drilled() -> None:
    broken = answer(replace(SHORT, target=f"{HERE}:raises"), [])
    assert "KeyError" in broken.error
    with pytest.raises(InputError, match="the onset is step 50"):
        drill(replace(SHORT, onset=50), choose(["amp"]))
    with pytest.raises(InputError, match="expected observe, advise or act"):
        drill(replace(SHORT, mode="raise"), choose(["amp"]))


def test_a_guard_that_acts_is_held_against_nobody_watching() -> None:
    alone = train("nan-in-gradient", guarded=False)
    kept = train("nan-in-gradient", mode="advise")
    row = judge(FAULTS["nan-in-gradient"], 0, SHORT.onset, clean_of(), kept, alone)
    assert row.status == FOUND
    assert row.harm == "loss not finite from step 26 on"
    assert row.kept.startswith("loss 0.")
    assert kept.rejected == 1


def test_an_interrupt_ends_the_drill_and_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Asked:
        def __init__(self, env: Any) -> None:
            self.closed = False

        def ask(self, task: Task, timeout_s: float) -> Result:
            asked.append(task.fault)
            return replace(CLEAN, losses=CLEAN.losses)

        def close(self) -> None:
            asked.append("closed")

        def __enter__(self) -> Asked:
            return self

        def __exit__(self, *error: object) -> None:
            self.close()

    def stop(row: Row) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("trimtab.drill.session.Child", Asked)
    with pytest.raises(KeyboardInterrupt):
        drill(SHORT, choose(["wiring"]), on_row=stop)
    assert asked[-1] == "closed"
    assert len(asked) < 6


def test_a_device_that_fails_ends_the_run_and_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("device-side assert triggered")

    monkeypatch.setattr("trimtab.drill.trial.nonfinite_parts", fails)
    result = train(num_steps=3, onset=1)
    assert result.broken
    assert len(result.losses) == 3
