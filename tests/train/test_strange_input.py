"""What a stranger gives to a trainer: it works, or is told before the first step what was expected."""

from __future__ import annotations

import logging
import math
import shutil
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from tests.train.helpers import QUIET, loaders, network, trainer
from trimtab.core.errors import CheckpointError, ConfigError, InputError
from trimtab.train.settings import TrainConfig
from trimtab.train.stages import Stage, Surroundings
from trimtab.train.trainer import Trainer

Row = namedtuple("Row", "x y")
ONE = TrainConfig(num_epochs=1, scheduler_type="none")


class Rows(Dataset):
    def __init__(self, shape: Any) -> None:
        self.shape = shape

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> Any:
        x = torch.randn(5, generator=torch.Generator().manual_seed(i))
        return self.shape(x=x, y=x.sum(0, keepdim=True))


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter([Rows(Row)[i] for i in range(16)])


def test_seven_batches_three_to_a_step_make_three_steps_of_a_schedule() -> None:
    """Groups of 3, 3 and 1; the last is divided by its own count, and one cycle ends with the last step."""
    norms: list[float] = []

    def note(run: Trainer) -> None:
        norms.append(float(run.model.weight.grad.norm()))

    def constant(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.mean()

    ones = [(torch.ones(4, 5), torch.zeros(4, 1))] * 7
    config = TrainConfig(num_epochs=2, accumulation_steps=3, scheduler_type="onecycle")
    run = Trainer(nn.Linear(5, 1), constant, config, around=QUIET, before_step=note)
    run.train(ones)
    assert norms == pytest.approx([math.sqrt(5.0)] * 6)
    inner = run.last_rig.schedule._inner
    assert (run.course.steps_done, inner.total_steps, inner.last_epoch) == (6, 6, 5)


@pytest.mark.parametrize(("num", "drop"), [(0, False), (4, True)])
def test_a_loader_without_batches_is_told(num: int, drop: bool) -> None:
    data = torch.zeros(num, 5)
    empty = DataLoader(list(zip(data, data.sum(1, keepdim=True), strict=True)), batch_size=8, drop_last=drop)
    with pytest.raises(InputError, match=f"has no batches: {num} rows, batch_size 8, drop_last {drop}; give more data"):
        trainer(ONE).train(empty)
    with pytest.raises(InputError, match="the validation loader has no batches"):
        trainer(ONE).train(loaders()[0], empty)
    with pytest.raises(InputError, match="the training loader is a NoneType; expected a DataLoader"):
        trainer(ONE).train(None)


def test_lists_and_streams_are_loaders_too(tmp_path: Path) -> None:
    around = replace(QUIET, checkpoint_dir=tmp_path)
    assert trainer(ONE, around).train(list(loaders()[0])).epochs[0]["num_steps"] == 8
    stream = DataLoader(Stream(), batch_size=8)
    assert len(trainer(replace(ONE, num_epochs=2, warmup_steps=2)).train(stream).epochs) == 2
    assert trainer(TrainConfig(max_steps=3, scheduler_type="cosine")).train(stream).column("num_steps") == [2, 1]
    with pytest.raises(InputError, match=r"of kind 'cosine' must know; give max_steps, or scheduler_type none"):
        trainer(TrainConfig(scheduler_type="cosine")).train(stream)
    with pytest.raises(InputError, match="gave no batch in epoch 2: it can be read only once"):
        trainer(replace(ONE, num_epochs=2)).train(batch for batch in loaders()[0])


def test_batches_may_be_named_or_dictionaries() -> None:
    named = DataLoader(Rows(Row), batch_size=8)
    assert trainer(ONE).train(named, named).epochs[0]["val_loss"] > 0

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch["x"]), batch["y"])

    dicts = DataLoader(Rows(dict), batch_size=8)
    assert Trainer(network(), step_fn=step, config=ONE, around=QUIET).train(dicts, dicts).epochs[0]["val_loss"] > 0
    with pytest.raises(InputError, match="the batch is a dict; expected a pair"):
        trainer(ONE).train(dicts)
    with pytest.raises(InputError, match=r"metrics.* needs loss_fn"):
        Trainer(network(), step_fn=step, metrics=lambda said, wanted: {})


def test_one_batch_and_no_validation_are_enough() -> None:
    data = loaders(8, 8)[0]
    history = trainer(replace(ONE, num_epochs=3)).train(data)
    assert history.column("num_steps") == [1, 1, 1]
    assert history.column("val_loss") == []


@pytest.mark.parametrize(
    ("monitor", "hint"), [("-val_loss", "give a validation loader"), ("-train_los", "did you mean")]
)
def test_a_metric_that_nobody_measures_is_told_once(monitor: str, hint: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer(replace(ONE, num_epochs=3, patience=1, monitor=monitor)).train(loaders()[0])
    (said,) = [line for line in caplog.messages if "no epoch has the metric" in line]
    assert hint in said


def test_an_evaluation_without_a_loss_is_recorded_and_judges_nothing() -> None:
    how: dict[str, Any] = {"evaluate": lambda model, loader: {"accuracy": torch.tensor(0.5)}, "around": QUIET}
    run = Trainer(network(), nn.functional.mse_loss, replace(ONE, monitor="accuracy"), **how)
    assert run.train(*loaders()).column("accuracy") == [0.5]
    assert run.stopping.best == 0.5
    assert run.findings == []


def test_a_validation_of_nan_is_no_plateau() -> None:
    config = TrainConfig(num_epochs=6, scheduler_type="plateau")
    how: dict[str, Any] = {"evaluate": lambda model, loader: {"loss": math.nan}, "around": QUIET}
    history = Trainer(network(), nn.functional.mse_loss, config, **how).train(*loaders())
    assert history.column("learning_rates") == [[1e-3]] * 6


def test_what_a_later_stage_would_fail_on_is_told_at_once() -> None:
    last = Stage(name="b", epochs=1, frozen=("0", "1", "3"))
    with pytest.raises(InputError, match="stage 'b' freezes every parameter"):
        trainer(stages=[Stage(name="a", epochs=1), last])
    with pytest.raises(InputError, match=r"a stage is named '\.\./b'; expected letters"):
        trainer(stages=[Stage(name="a"), Stage(name="../b")])
    with pytest.raises(InputError, match="a ReLU, has no parameters"):
        trainer(model=nn.ReLU())
    with pytest.raises(InputError, match="the model is a function"):
        trainer(model=lambda x: x)
    run = trainer(stages=[Stage(name="a", epochs=0), Stage(name="b", epochs=1)])
    assert [row["stage"] for row in run.train(loaders()[0]).epochs] == ["b"], "no epochs, no stage"


def test_losses_that_are_none() -> None:
    with pytest.raises(InputError, match="the loss is a float; expected a tensor"):
        Trainer(network(), lambda said, wanted: 3.0, ONE, around=QUIET).train(loaders()[0])
    with pytest.raises(InputError, match=r"the loss has shape \(8, 1\); expected one number"):
        Trainer(network(), lambda said, wanted: said - wanted, ONE, around=QUIET).train(loaders()[0])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("learning_rate", "0.1", "a number"),
        ("learning_rate", math.nan, "a number above 0"),
        ("num_epochs", 0, "a number above 0"),
        ("num_epochs", 2.5, "a whole number"),
        ("patience", True, "a whole number"),
        ("mode", "wild", "one of observe, advise, act, raise"),
    ],
)
def test_d1_settings_that_make_no_sense_are_told(name: str, value: Any, expected: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is {value!r}; expected {expected}"):
        TrainConfig(**{name: value})
    with pytest.raises(ConfigError, match=f"{name} is {value!r}"):
        Trainer(network(), nn.functional.mse_loss, {name: value})


def test_places_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No record is a warning; no checkpoints is an error at once; a disk that goes away later costs no training."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    assert len(trainer(ONE, Surroundings(run_dir=blocked / "run")).train(loaders()[0]).epochs) == 1
    assert "training goes on without a record" in caplog.text
    caplog.clear()
    with pytest.raises(CheckpointError, match="could not be saved: Not a directory"):
        trainer(ONE, replace(QUIET, checkpoint_dir=blocked / "kept")).train(loaders()[0])
    assert "To resume" not in caplog.text, "there is nothing to go on from"

    def lose(run: Trainer) -> None:
        if run.course.steps_done == 3:
            shutil.rmtree(tmp_path / "kept")
            (tmp_path / "kept").write_text("in the way")

    with caplog.at_level(logging.WARNING):
        run = trainer(
            replace(ONE, num_epochs=2), replace(QUIET, checkpoint_dir=str(tmp_path / "kept")), before_step=lose
        )
        assert len(run.train(*loaders()).epochs) == 2
    assert "history.json could not be written" in caplog.text


def test_each_stage_records_below_the_folder_of_the_run(tmp_path: Path) -> None:
    stages = [Stage(name="a", epochs=1), Stage(name="b", epochs=1)]
    run = trainer(ONE, Surroundings(run_dir=tmp_path / "r"), stages=stages)
    run.train(loaders()[0])
    assert [folder.name for folder in run.run_dirs] == ["1-a", "2-b"]
    assert all((folder / "run.jsonl").exists() for folder in run.run_dirs)
