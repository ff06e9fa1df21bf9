"""Checkpoints within an epoch, for every recipe: by default where an epoch is long, and checked before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trimtab.checkpoint.checkpointer import Checkpointer
from trimtab.core.errors import CheckpointError, InputError
from trimtab.train.recipe import Parts, Recipe, run_recipe
from trimtab.train.recipes import load_recipe

TINY = {"epochs": 1, "batch_size": 4}


def never(settings: Any) -> Parts:
    raise AssertionError("work was begun before the resume was checked")


def test_a_long_epoch_is_saved_within(tmp_path: Path) -> None:
    run_recipe(load_recipe("tabular"), TINY, run_dir=False, checkpoint_dir=tmp_path)
    steps = [one.step for one in Checkpointer(tmp_path).list()]
    assert len(steps) >= 2
    assert steps[0] % 25 == 0, "within the epoch"


@pytest.mark.parametrize("every", [0, 40])
def test_the_number_given_counts(every: int, tmp_path: Path) -> None:
    done = run_recipe(load_recipe("tabular"), TINY, run_dir=False, checkpoint_dir=tmp_path, checkpoint_every=every)
    found = [one.step for one in Checkpointer(tmp_path).list()]
    assert 80 < done.num_steps < 120
    assert found == ([40, 80, done.num_steps] if every else [done.num_steps])


def test_steps_between_checkpoints_need_a_place_for_them() -> None:
    with pytest.raises(InputError, match="checkpoint_every is 5, but there is no folder"):
        run_recipe(load_recipe("tabular"), TINY, run_dir=False, checkpoint_every=5)


@pytest.mark.parametrize(
    ("resume", "how", "error", "told"),
    [
        ("auto", {}, InputError, "nothing to resume from without checkpoints"),
        ("best", {}, InputError, "'best' is best_model in the folder of checkpoints"),
        ("nowhere", {}, CheckpointError, "nowhere does not exist; give auto"),
        ("auto", {"guarded": False}, InputError, "a training without a guard keeps no checkpoints"),
        (__file__, {}, CheckpointError, "is no checkpoint by its name"),
    ],
)
def test_resume_is_checked_before_any_work(resume: str, how: Any, error: type[Exception], told: str) -> None:
    recipe = Recipe(name="r", summary="", build=never, score="r2")
    with pytest.raises(error, match=told):
        run_recipe(recipe, resume=resume, run_dir=False, **how)


def test_b21_the_documented_name_of_the_best_model(tmp_path: Path) -> None:
    recipe, given = load_recipe("tabular"), TINY | {"batch_size": 64}
    run_recipe(recipe, given, run_dir=False, checkpoint_dir=tmp_path)
    assert (tmp_path / "best_model").is_dir()
    result = run_recipe(recipe, given, run_dir=False, resume=str(tmp_path / "best_model.pth"))
    assert len(result.history) == 1


def test_b8_the_line_counts_the_epochs_of_all_stages(tmp_path: Path) -> None:
    from tests.train.test_segment import TINY as SMALL

    said: list[str] = []
    run_recipe(load_recipe("segment"), SMALL | {"epochs": 3, "stage1_epochs": 1}, run_dir=False, say=said.append)
    bars = [line.partition(":")[0] for line in said if line.startswith("Epoch") and "Stage 0" not in line]
    assert bars[-3:] == ["Epoch 1/3", "Epoch 2/3", "Epoch 3/3"]
