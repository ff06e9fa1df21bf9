"""Checkpoints of the segmentation: killed, resumed, rotated, damaged, and begun again from the best."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.test_segment import RECIPE, TINY
from trimtab.checkpoint.checkpointer import Checkpointer
from trimtab.compat.checkpoint_pair import read_checkpoint
from trimtab.core.errors import InputError
from trimtab.train.recipe import Result, build_parts, run_recipe, settings_of
from trimtab.train.recipes.segment import evaluate

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def go(folder: Path, **given: Any) -> Result:
    how = {name: given.pop(name) for name in ("resume", "say") if name in given}
    return run_recipe(RECIPE, TINY | given, run_dir=False, checkpoint_dir=folder, **how)


def newest(folder: Path, stage: str = "2-all") -> dict[str, Any]:
    """The newest checkpoint of a stage, with everything that is in it."""
    last = Checkpointer(folder / stage).list()[-1]
    found = read_checkpoint(last.path)
    return {"step": last.step, **{name: found[name] for name in ("model_state_dict", "optimizer_state_dict")}}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(alike(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


KILLED = """
import torch
from pathlib import Path
from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe
torch.set_num_threads(1)
run_recipe(load_recipe("segment"), {given!r}, run_dir=False, checkpoint_dir=Path({folder!r}))
"""


@pytest.mark.parametrize("at", [2, 6], ids=["in stage 1", "in stage 2"])
def test_b15_b28_b29_killed_within_an_epoch_and_resumed_ends_with_the_same_bits(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps an epoch: ended before the second one, in either stage; the document could not do that in stage 1."""
    given = TINY | {"use_ema": True, "epochs": 4}
    whole = go(tmp_path / "whole", **given)
    if at == 6:  # SIGKILL leaves no time for anything: a process of its own
        code = KILLED.format(given=given | {"kill_at_step": at}, folder=str(tmp_path / "broken"))
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    else:
        monkeypatch.setattr("os.kill", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "broken", **given, kill_at_step=at)
        monkeypatch.undo()
    again = go(tmp_path / "broken", **given, resume="auto")
    assert alike(newest(tmp_path / "whole"), newest(tmp_path / "broken"))
    assert again.metrics == whole.metrics
    assert [row["IoU"] for row in again.history] == [row["IoU"] for row in whole.history]


def _interrupt(pid: int, signal: int) -> None:
    raise KeyboardInterrupt


@pytest.mark.long
def test_b17_b20_110_epochs_rotate_in_numeric_order_and_the_best_stays(tmp_path: Path) -> None:
    """Sorted by name, as in the original, epochs 97 to 99 would be kept and the newest deleted."""
    small = {"num_images": 4, "batch_size": 4, "accumulation_steps": 1, "epochs": 111, "lr": 0.001}
    result = go(tmp_path, **small)
    kept = [snapshot.step for snapshot in Checkpointer(tmp_path / "2-all").list()]
    scores = [row["IoU"] for row in result.history if row["stage"] == "all"]
    assert len(scores) == 110
    assert kept[-3:] == [108, 109, 110]
    best = 1 + scores.index(max(scores))
    assert best in kept
    assert len(kept) <= 5, "the last three, the best, and the newest proven good"


def test_b18_b20_best_model_holds_the_weights_that_were_measured(tmp_path: Path) -> None:
    """In the original it held the raw weights, and the metric was that of their average."""
    result = go(tmp_path, use_ema=True, ema_decay=0.5, epochs=5)
    parts = build_parts(RECIPE, settings_of(RECIPE, TINY))
    found = read_checkpoint(tmp_path / "best_model")
    parts.model.load_state_dict(found["model_state_dict"])
    best = max(result.history, key=lambda row: row["IoU"])
    assert evaluate(parts.model, parts.val_loader)["IoU"] == pytest.approx(best["IoU"], abs=1e-12)
    assert found["metrics"]["IoU"] == best["IoU"]
    rows = json.loads((tmp_path / "history.json").read_text())
    assert [row["stage"] for row in rows] == ["head", "all", "all", "all", "all"]


@pytest.mark.parametrize("how", ["truncated", "a NaN in it"])
def test_b29_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(how: str, tmp_path: Path) -> None:
    whole = go(tmp_path, epochs=4)
    wanted = newest(tmp_path)
    folder = Checkpointer(tmp_path / "2-all")
    *_, before, last = folder.list()
    if how == "truncated":
        data = max(last.path.iterdir(), key=lambda one: one.stat().st_size)
        data.write_bytes(data.read_bytes()[:-100])
    else:
        parts = build_parts(RECIPE, settings_of(RECIPE, TINY))
        next(parts.model.parameters()).data[0] = torch.nan
        assert folder.save(last.step + 1, model=parts.model).state == "bad"
    seen: list[str] = []
    again = go(tmp_path, epochs=4, resume="auto", say=seen.append)
    assert again.metrics == whole.metrics
    assert alike(newest(tmp_path)["model_state_dict"], wanted["model_state_dict"])
    assert before.step < last.step
    if how == "truncated":
        assert any(line.startswith("Epoch 4/4") for line in seen), "the last epoch was trained once more"


def test_b21_resume_best_runs_stage_2_at_exactly_the_rate_given(tmp_path: Path) -> None:
    """The documented command; there stage 2 halved the rate once more, to 0.0000625."""
    first = go(tmp_path, epochs=4)
    said: list[str] = []
    again = go(tmp_path, epochs=4, resume="best", lr=0.000125, say=said.append)
    assert f"weights of {tmp_path / 'best_model'}" in said
    assert "Stage 2/2 (all): 3 epochs; peak learning rates: backbone 1.25e-05, head 0.000125" in said
    assert [row["stage"] for row in again.history] == ["all"] * 3
    assert again.facts["peak_lr"]["all"]["head"] == pytest.approx(0.000125, rel=0.1)
    best = max(row["IoU"] for row in first.history)
    assert again.history[0]["IoU"] == pytest.approx(best, abs=0.25), "begun with the best weights, at a small rate"


def test_b21_b23_what_lr_means_in_each_way_of_going_on(tmp_path: Path) -> None:
    def head_rate(**given: Any) -> float:
        settings = settings_of(RECIPE, TINY | {"checkpoint_dir": tmp_path} | given)
        rate = build_parts(RECIPE, settings).stages[-1].learning_rate
        assert rate is not None
        return rate

    assert head_rate(lr=0.00025) == 0.000125
    assert head_rate(lr=0.00025, resume="auto") == 0.000125, "the same command goes on with the same training"
    assert head_rate(lr=0.000125, resume="best") == 0.000125
    assert head_rate(lr=None, resume="best") == head_rate(lr=None)
    assert head_rate(lr=0.00025, resume_from="best", skip_stage1=True) == 0.000125
    assert head_rate(lr=0.00025, resume="best", stage2_lr=0.01) == 0.01


def test_b16_b23_what_cannot_be_resumed_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'best' is best_model in the folder of checkpoints; give it"):
        run_recipe(RECIPE, TINY, run_dir=False, resume="best")
    with pytest.raises(InputError, match=r"there is no sound checkpoint at .*best_model"):
        go(tmp_path, resume="best")
    with pytest.raises(InputError, match=r"--resume is 'auto' and --resume-from 'best'; give one of them"):
        go(tmp_path, resume="auto", resume_from="best")


def test_b23_resume_from_takes_the_weights_alone(tmp_path: Path) -> None:
    go(tmp_path / "one", epochs=2)
    path = tmp_path / "one" / "best_model"
    result = go(tmp_path / "two", epochs=3, resume_from=str(path), lr=1e-9)
    assert [row["stage"] for row in result.history] == ["head", "all", "all"]
    wanted, found = (read_checkpoint(one)["model_state_dict"] for one in (path, tmp_path / "two" / "best_model"))
    name = "backbone.levels.0.0.conv.weight"
    torch.testing.assert_close(found[name], wanted[name], atol=1e-5, rtol=0)
