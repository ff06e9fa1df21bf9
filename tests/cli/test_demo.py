import math

import pytest

from trimtab.train.demo import Plan, run_demo


def test_quick_demo_shows_every_part(trimtab, tmp_path):
    said = trimtab("demo", "--quick", "--dir", tmp_path)
    assert said.code == 0, said.err
    for part in ("clean", "unguarded", "guarded", "NaN", "nonfinite-loss", "trimtab report", "trimtab explain"):
        assert part in said.out, part
    (run,) = tmp_path.iterdir()
    assert trimtab("replay", run).code == 0
    assert trimtab("report", run).code == 0


def test_quick_demo_as_json(trimtab, tmp_path):
    data = trimtab("demo", "--quick", "--json", "--dir", tmp_path, "--seed", "1").json()
    arms = {a["name"]: a for a in data["arms"]}
    assert arms["clean"]["weights_finite"]
    assert not arms["unguarded"]["weights_finite"]
    assert arms["guarded"]["weights_finite"]
    assert arms["guarded"]["num_rejected"] >= 1
    assert {f["code"] for f in data["findings"]} >= {"LOSS001", "GRAD001"}


def test_on_a_terminal_there_are_three_bars(trimtab, tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    said = trimtab("demo", "--quick", "--dir", tmp_path)
    assert said.code == 0
    assert said.out.count("━") >= 3


@pytest.mark.long
def test_the_story_is_true(tmp_path):
    """Each fault alone breaks the unguarded arm; the guarded arm survives both."""
    both = {a.name: a for a in run_demo(Plan(), tmp_path, lambda step, arms: None).arms}
    assert both["clean"].test_accuracy > 0.97
    assert not both["unguarded"].weights_finite
    assert math.isnan(both["unguarded"].final_loss)
    assert both["guarded"].weights_finite
    assert both["guarded"].test_accuracy > 0.9
    spike = {a.name: a for a in run_demo(Plan(nan_step=-1), tmp_path, lambda step, arms: None).arms}
    assert spike["unguarded"].test_accuracy < 0.5


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        (Plan(num_epochs=2, nan_step=25), 25),
        (Plan(num_epochs=2, nan_step=25, seed=3), 25),
        (Plan(num_epochs=2, nan_step=-1), 55),  # the first wrong update is that of step 54: its loss is still the same
    ],
)
def test_the_arms_are_the_same_run_until_the_fault(plan, fault, tmp_path):
    """Same seed, same batches, same settings: only a fault, or what a guard does about it, may make a difference."""
    clean, unguarded, guarded = (arm.losses for arm in run_demo(plan, tmp_path, lambda step, arms: None).arms)
    assert clean[:fault] == unguarded[:fault] == guarded[:fault]
    assert clean[fault] != unguarded[fault]
    assert clean != guarded


def test_the_demo_says_what_the_guard_did(trimtab, tmp_path):
    said = " ".join(trimtab("demo", "--quick", "--dir", tmp_path).out.split())
    assert "done: " in said.partition("What the guard found, and did")[2]
    assert "All three have the same seed, batches and settings" in said


def test_without_a_guard_there_is_nothing_to_show(trimtab, monkeypatch):
    monkeypatch.setenv("TRIMTAB_DISABLE", "1")
    said = trimtab("demo", "--quick")
    assert said.code == 2
    assert "TRIMTAB_DISABLE" in said.err
