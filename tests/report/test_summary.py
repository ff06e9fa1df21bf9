import math
from dataclasses import replace

import pytest

from trimtab.record.reader import read_run
from trimtab.report.summary import Health, summarise
from trimtab.report.text import to_text

NAN = math.nan


def falling(num: int, low: float = 0.1) -> list[float]:
    return [low + 2.0 * 0.95**i + 0.01 * (i % 3) for i in range(num)]


def test_a_healthy_run(write_run):
    summary = summarise(read_run(write_run(falling(120))))
    assert summary.health is Health.HEALTHY
    assert summary.incidents == ()
    assert summary.tracks[0].num_steps == 120
    assert summary.tracks[0].loss.first == pytest.approx(2.1)
    assert "no findings" in summary.headline
    text = to_text(summary)
    assert "HEALTHY" in text
    assert "found" not in text.split("gradient norm")[1], "no empty section"


def test_one_nan_step_is_told_with_its_cause_and_advice(write_run):
    losses = falling(120)
    losses[60] = NAN
    summary = summarise(read_run(write_run(losses)))
    assert summary.health is Health.RECOVERED
    assert summary.num_rejected == 1
    assert summary.tracks[0].rejected_steps == (60,)
    (incident,) = summary.incidents
    assert [t.finding.code for t in incident.troubles] == ["LOSS001", "GRAD001"]
    assert {d.kind for d in summary.deeds} == {"skip", "cut_lr"}
    text = to_text(summary)
    for part in (
        "RECOVERED",
        "LOSS001",
        "nonfinite-loss",
        "step 60",
        "kept out",
        "→",
        "multiply the learning rate",
        "×",
    ):
        assert part in text, part
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_that_stays_broken_is_sick_even_when_quiet(write_run):
    losses = falling(100) + [50.0] * 5 + [2.3 + 0.01 * (i % 3) for i in range(60)]
    summary = summarise(read_run(write_run(losses)))
    assert summary.health is Health.SICK
    assert "has not come back" in summary.headline


def test_a_loss_that_rises_is_no_sickness_where_the_objective_may_move(write_run):
    losses = falling(100) + [50.0] * 5 + [2.3 + 0.01 * (i % 3) for i in range(60)]
    summary = summarise(read_run(write_run(losses, fixed=False)))
    assert summary.health is Health.HEALTHY
    assert not summary.incidents
    assert "has not come back" not in summary.headline


def test_a_run_that_ends_in_nan_is_sick(write_run):
    summary = summarise(read_run(write_run(falling(60) + [NAN] * 30, settings={"mode": "advise"})))
    assert summary.health is Health.SICK
    assert "not finite at the end" in summary.headline
    assert summary.incidents[0].troubles[0].num_steps == 30
    assert "30 steps" in to_text(summary)


def test_a_record_without_its_end_is_unfinished(write_run):
    summary = summarise(read_run(write_run(falling(30), closed=None)))
    assert summary.health is Health.UNFINISHED
    assert "UNFINISHED" in to_text(summary)
    assert "not closed" in summary.headline
    assert summary.tracks[0].num_steps == 30


def test_a_run_that_ended_with_an_exception(write_run):
    summary = summarise(read_run(write_run(falling(30), closed="KeyboardInterrupt")))
    assert summary.health is Health.INTERRUPTED
    assert "KeyboardInterrupt" in summary.headline


def test_a_stopped_run_says_so(write_run):
    summary = summarise(read_run(write_run(falling(30) + [NAN] * 3, closed="stopped")))
    assert summary.health is Health.STOPPED
    assert "STOPPED" in to_text(summary)


def test_a_run_that_never_was_finite(write_run):
    text = to_text(summarise(read_run(write_run([NAN] * 20))))
    assert "SICK" in text


def test_narrow_terminals_and_many_incidents(write_run):
    losses = falling(400)
    for step in range(20, 400, 25):
        losses[step] = NAN
    summary = summarise(read_run(write_run(losses)))
    assert len(summary.incidents) == 16
    text = to_text(summary, width=50)
    assert "8 more" in text
    assert max(map(len, text.splitlines())) <= 50


def test_text_names_optimizers_validation_and_what_is_wrong_with_the_record(write_run):
    summary = summarise(read_run(write_run(falling(60))))
    track = replace(summary.tracks[0], optimizer="generator", val_loss=summary.tracks[0].loss, loss=None)
    text = to_text(replace(summary, tracks=(track,), problems=("line 3 is damaged",), num_parameters=0))
    for part in ("generator: gradient norm", "generator: validation loss", "line 3 is damaged"):
        assert part in text, part


def test_many_actions_are_told_briefly(write_run):
    summary = summarise(read_run(write_run(falling(60) + [NAN] * 8 + falling(20))))
    assert len(summary.deeds) == 9, "a skip for each step, and one cut"
    text = to_text(summary)
    assert "steps 61 to 67 (7 times)" in text
    failed = replace(summary.deeds[0], applied=False, detail="no scaler")
    several = tuple(replace(failed, about=i, because=(f"R{i}",)) for i in range(20))
    text = to_text(replace(summary, deeds=several))
    assert "could not be done [no scaler]" in text
    assert "… and 8 more" in text
