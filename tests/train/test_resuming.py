"""Going on with other settings, from other places: what is given now holds, and what cannot fit is told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.helpers import QUIET, loaders, trainer
from trimtab.core.errors import CheckpointError, InputError
from trimtab.train.schedules import make_schedule
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import Stage
from trimtab.train.trainer import Trainer

BASE = TrainConfig(num_epochs=3, scheduler_type="cosine", checkpoint_every=3)
STAGES = (Stage(name="a", epochs=1, frozen=("0",)), Stage(name="b", epochs=2))


def broken(folder: Path, at: int, config: TrainConfig = BASE, **how: Any) -> None:
    """A training that ends with Ctrl-C before that step, its gradients made."""

    def interrupt(run: Trainer) -> None:
        if run.course.steps_done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trainer(config, replace(QUIET, checkpoint_dir=folder), before_step=interrupt, **how).train(*loaders())


def again(
    folder: Path | None, config: TrainConfig = BASE, resume: Any = "auto", data: Any = None, **how: Any
) -> Trainer:
    run = trainer(config, replace(QUIET, checkpoint_dir=folder), **how)
    run.train(*(data or loaders()), resume=resume)
    return run


def planned(config: TrainConfig, at: int, total: int) -> float:
    """The rate of a fresh schedule at that step."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=config.learning_rate)
    schedule = make_schedule(optimizer, config.scheduler_type, total_steps=total)
    for _ in range(at):
        optimizer.step()
        schedule.step()
    return schedule.rates[0]


@pytest.mark.parametrize(
    ("other", "total"),
    [
        ({"num_epochs": 5}, 40),
        ({"learning_rate": 2e-3}, 24),
        ({"scheduler_type": "onecycle"}, 24),
        ({"scheduler_type": "none", "learning_rate": 2e-3}, 24),
    ],
)
def test_b21_a_rate_or_an_end_that_is_given_anew_holds(
    other: dict[str, Any], total: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken(tmp_path, 13)
    config = replace(BASE, **other)
    rates: list[float] = []
    run = again(tmp_path, config, before_step=lambda one: rates.append(one.rig.schedule.rates[0]))
    assert rates == pytest.approx([planned(config, step, total) for step in range(13, total)])
    assert run.course.steps_done == total
    assert "the schedule continues at step 13 of another plan: " in caplog.text


def test_other_settings_are_told_and_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken(tmp_path, 13)
    run = again(tmp_path, replace(BASE, weight_decay=0.5, use_amp=True, amp_dtype="fp16", ema_decay=0.9))
    (said,) = [line for line in caplog.messages if "was saved with other settings" in line]
    assert "weight_decay was 0.0001, is 0.5; use_amp was False, is True" in said
    assert "ema_decay was None, is 0.9" in said
    assert run.last_rig.optimizer.param_groups[0]["weight_decay"] == 0.5
    assert len(run.history.epochs) == 3


def test_the_same_settings_are_no_news(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = replace(BASE, use_amp=True, amp_dtype="fp16", ema_decay=0.9, accumulation_steps=3)
    whole = again(None, config, resume=None)
    broken(tmp_path, 4, config)
    caplog.clear()
    run = again(tmp_path, config)
    assert caplog.messages == []
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, run.model.state_dict()[name]), name


def test_what_does_not_fit_says_what_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken(tmp_path, 13)
    caplog.clear()
    with pytest.raises(CheckpointError, match="batch_size is 8 in the checkpoint, 16 here"):
        again(tmp_path, data=loaders(batch_size=16))
    with pytest.raises(CheckpointError, match="its class is AdamW in the checkpoint, SGD here"):
        again(tmp_path, replace(BASE, optimizer="sgd"))
    with pytest.raises(
        InputError, match=r"other stages than those of this training: a single stage; its stages are a, b\."
    ):
        again(tmp_path, stages=STAGES)
    with pytest.raises(InputError, match="a training without a guard keeps no checkpoints"):
        trainer(BASE, replace(QUIET, checkpoint_dir=tmp_path, guarded=False)).train(loaders()[0], resume="auto")
    assert "To resume" not in caplog.text, "these were no trainings"


def test_stages_of_other_names_or_numbers(tmp_path: Path) -> None:
    broken(tmp_path, 13, stages=STAGES)
    with pytest.raises(InputError, match="other stages than those of this training: 1-a, 2-b; its stages are train"):
        again(tmp_path)
    with pytest.raises(InputError, match="this training: 2-b; its stages are a, z"):
        again(tmp_path, stages=(STAGES[0], Stage(name="z", epochs=2)))
    more = again(tmp_path, stages=(*STAGES, Stage(name="c", epochs=1)))
    assert [row["stage"] for row in more.history.epochs] == ["a", "b", "b", "c"]


def test_b16_any_checkpoint_under_a_path(tmp_path: Path) -> None:
    """A folder of checkpoints, one of them, in a stage or not: the end is always that of the whole training."""
    whole = again(tmp_path / "whole", stages=STAGES, resume=None)
    step = min((tmp_path / "whole" / "2-b").glob("step-*"))
    broken(tmp_path / "broken", 13, stages=STAGES)
    for path in (step, tmp_path / "broken", tmp_path / "whole"):
        run = again(None, stages=STAGES, resume=str(path))
        assert run.history.column("val_loss") == whole.history.column("val_loss"), path
    with pytest.raises(CheckpointError, match="does not exist"):
        again(None, resume=tmp_path / "nothing")


def test_a_file_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    junk = tmp_path / "junk.pth"
    junk.write_bytes(b"hello")
    with pytest.raises(CheckpointError, match=r"junk\.pth cannot be read"):
        again(None, resume=junk)


def test_b19_ctrl_c_says_how_to_go_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    broken(tmp_path, 5)
    (said,) = [line for line in caplog.messages if "To resume" in line]
    assert "training ended with KeyboardInterrupt" in said
    assert "--resume auto" in said
