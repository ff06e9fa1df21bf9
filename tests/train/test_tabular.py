from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.matrix import sampled
from trimtab.core.errors import InputError
from trimtab.train.recipe import Result, compare, doctor_target, run_recipe, settings_of
from trimtab.train.recipes import load_recipe
from trimtab.train.settings import SCHEDULES

RECIPE = load_recipe("tabular")


def go(fault: str | None = None, *, guarded: bool = True, **given: Any) -> Result:
    return run_recipe(RECIPE, given, fault=fault, guarded=guarded, run_dir=False)


@pytest.fixture(scope="module")
def clean() -> Result:
    torch.set_num_threads(1)
    return go()


def test_a_clean_run_is_silent_and_good(clean: Result) -> None:
    assert clean.findings == ()
    assert clean.actions == ()
    assert clean.score > 0.42


@pytest.mark.parametrize(
    ("fault", "action"),
    [
        ("nan-features", "(LR multiplier 1 -> 0.5"),
        ("label-1e9", "(LR multiplier 1 -> 0.5"),
        ("lr-x1000", "roll the weights back"),
        ("nan-validation", "(LR multiplier 1 -> 0.5"),
    ],
)
def test_d7_each_fault_is_answered_and_the_score_is_that_of_a_clean_run(clean: Result, fault: str, action: str) -> None:
    held = go(fault)
    assert [line for line in held.actions if action in line], held.actions
    assert held.weights_finite
    assert held.score > 0.95 * clean.score


@pytest.mark.parametrize(("fault", "dies"), [("nan-features", True), ("label-1e9", False), ("lr-x1000", False)])
def test_the_control_arm_fails(clean: Result, fault: str, dies: bool) -> None:
    bare = go(fault, guarded=False)
    assert bare.weights_finite is not dies
    assert not bare.score > 0.5 * clean.score


@pytest.mark.parametrize("kind", sampled([kind for kind in SCHEDULES if kind != "cosine"], "onecycle"))
def test_d14_a_nan_is_survived_under_every_schedule(kind: str) -> None:
    held = go("nan-features", scheduler=kind, epochs=24)
    assert held.rejected > 0
    assert any("(LR multiplier 1 -> 0.5" in line for line in held.actions)
    assert held.score > 0.95 * go(scheduler=kind, epochs=24).score


def test_d7_overfitting_raises_the_weight_decay_by_half() -> None:
    held = go("tiny-data")
    raised = [line for line in held.actions if "(weight decay 0.0001 -> 0.00015)" in line]
    assert raised
    assert "overfitting" in held.findings


def test_d7_the_documented_factors_after_an_epoch() -> None:
    loud = go("label-1e9", actions="documented", epochs=6)
    assert loud.history[4]["issues"] == ["loss_explosion"]
    assert "LR multiplier 1 -> 0.1" in loud.actions[0]
    silent = go("nan-validation", actions="documented", epochs=6)
    assert silent.history[4]["issues"] == ["val_loss_nan_inf"]
    assert "LR multiplier 1 -> 0.5" in silent.actions[0]


def test_classes_are_learnt_too_and_have_no_label_of_1e9() -> None:
    result = run_recipe(RECIPE, {"table": "breast-cancer", "epochs": 5}, run_dir=False)
    assert result.score_name == "accuracy"
    assert result.score > 0.92
    assert {"f1", "accuracy_class_0", "accuracy_class_1"} <= set(result.metrics)
    with pytest.raises(InputError, match="no label can be 1e9"):
        go("label-1e9", table="breast-cancer")


def test_compare_is_clean_guarded_unguarded() -> None:
    arms = compare(RECIPE, {"epochs": 2}, quick=True, fault="nan-features", run_dir=False)
    assert [(one.arm, one.fault) for one in arms] == [
        ("clean", None),
        ("guarded", "nan-features"),
        ("unguarded", "nan-features"),
    ]
    assert [math.isfinite(one.score) for one in arms] == [True, True, False]


def test_settings_are_checked_and_a_doctor_can_look() -> None:
    assert settings_of(RECIPE, {}, quick=True)["epochs"] == 12
    with pytest.raises(InputError, match="did you mean 'batch_size'"):
        settings_of(RECIPE, {"batchsize": 1})
    target = doctor_target(RECIPE)
    x, y = next(iter(target["loader"]))
    assert target["loss_fn"](target["model"](x), y).isfinite()


def test_two_runs_of_one_seed_are_the_same_run() -> None:
    state = torch.get_rng_state()
    first, second = go(epochs=3), go(epochs=3)
    assert first.metrics == second.metrics
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers are left alone"
    assert go(epochs=3, seed=7).metrics != first.metrics
