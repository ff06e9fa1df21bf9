from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.matrix import in_ci, sampled
from tests.train.helpers import QUIET, loaders, network, trainer
from trimtab.core.errors import InputError, TrainingStopped
from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe
from trimtab.train.settings import SCHEDULES, TrainConfig
from trimtab.train.stages import Stage, Surroundings
from trimtab.train.trainer import Trainer


def plain_data(num: int, batch: int) -> DataLoader:
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch)


def test_accumulation_with_a_short_last_group_is_that_of_larger_batches() -> None:
    """Twelve rows in batches of 2, four to a step: groups of 8 and 4 rows, each a mean over its own."""
    config = TrainConfig(num_epochs=2, optimizer="sgd", momentum=0.0, learning_rate=0.1, scheduler_type="none")
    models = []
    for size, steps in ((2, 4), (8, 1)):
        torch.manual_seed(0)
        run = trainer(replace(config, accumulation_steps=steps, max_grad_norm=None), model=nn.Linear(5, 1))
        run.train(plain_data(12, size))
        assert run.course.steps_done == 4
        models.append(run.model.state_dict())
    for name, value in models[0].items():
        torch.testing.assert_close(value, models[1][name])


def test_b14_one_clip_per_optimizer_step_under_accumulation() -> None:
    run = trainer(TrainConfig(num_epochs=1, accumulation_steps=4, max_grad_norm=1e-3))
    history = run.train(loaders()[0])
    assert run.course.steps_done == 2
    assert history.epochs[0]["clipped_frac"] == 1.0


@pytest.mark.parametrize(("dtype", "scaled"), [("bf16", False), ("fp16", True)])
def test_amp_has_a_scaler_for_float16_only_and_trains(dtype: str, scaled: bool) -> None:
    run = trainer(TrainConfig(num_epochs=6, use_amp=True, amp_dtype=dtype, learning_rate=0.02))
    losses = run.train(*loaders()).column("val_loss")
    assert (run.last_rig.scaler is not None) == scaled
    assert losses[-1] < 0.5 * losses[0]
    assert run.get_training_stats()["amp_enabled"] is True


def test_b12_the_scaler_of_a_stage_has_the_documented_settings() -> None:
    scaler = {"init_scale": 2.0**10, "growth_factor": 1.5, "backoff_factor": 0.5, "growth_interval": 1000}
    run = trainer(TrainConfig(use_amp=True, amp_dtype="fp16"), stages=[Stage(name="two", epochs=1, scaler=scaler)])
    run.train(loaders()[0])
    held = run.last_rig.scaler
    assert (held.get_scale(), held.get_growth_factor(), held.get_growth_interval()) == (1024.0, 1.5, 1000)


def test_the_average_follows_no_rejected_step_and_holds_buffers() -> None:
    train, val = loaders(16, 8)
    seen: list[tuple[int, torch.Tensor]] = []

    def note(run: Trainer) -> None:
        average = run.rig.ema
        seen.append((int(average.n_averaged), average.module[0].weight.detach().clone()))

    train.dataset.tensors[0][:, 0] = math.nan
    run = trainer(TrainConfig(num_epochs=2, ema_decay=0.9), after_step=note)
    run.train(train)
    assert run.rejected == 4
    assert [num for num, _ in seen] == [0, 0, 0, 0]
    train.dataset.tensors[0].nan_to_num_(0.0)
    run = trainer(TrainConfig(num_epochs=4, ema_decay=0.9), after_step=note)
    run.train(train, val)
    assert [num for num, _ in seen[4:]] == list(range(1, 9))
    buffers = dict(run.last_rig.ema.module.named_buffers())
    assert not torch.equal(buffers["1.running_mean"], dict(run.model.named_buffers())["1.running_mean"])
    assert not torch.equal(buffers["1.running_mean"], torch.zeros(16)), "buffers are averaged, too"


def test_a_step_that_the_scaler_skipped_moves_no_average() -> None:
    seen: list[tuple[int, torch.Tensor]] = []
    scaler = {"init_scale": 2.0**40, "growth_interval": 1000}
    config = TrainConfig(use_amp=True, amp_dtype="fp16", ema_decay=0.5, learning_rate=1e-3)
    run = trainer(
        config,
        stages=[Stage(name="one", epochs=4, scaler=scaler)],
        after_step=lambda one: seen.append((int(one.rig.ema.n_averaged), one.model[0].weight.detach().clone())),
    )
    before = run.model[0].weight.detach().clone()
    run.train(loaders()[0])
    weights = [before, *(weight for _, weight in seen)]
    moved = [not torch.equal(a, b) for a, b in pairwise(weights)]
    assert 0 < sum(moved) < len(moved), "far too large a scale at first, then it fits"
    assert [num for num, _ in seen] == list(accumulate(moved))


def test_early_stopping_ends_a_run_that_does_not_improve() -> None:
    config = TrainConfig(num_epochs=30, patience=3, learning_rate=1e-12, scheduler_type="none", min_delta=0.5)
    history = trainer(config).train(*loaders())
    assert len(history.epochs) == 4


def test_max_steps_ends_within_an_epoch() -> None:
    run = trainer(TrainConfig(num_epochs=10, max_steps=11))
    history = run.train(*loaders())
    assert run.course.steps_done == 11
    assert [row["num_steps"] for row in history.epochs] == [8, 3]


def two_stages() -> tuple[Stage, Stage]:
    first = Stage(name="head", epochs=2, frozen=("0", "1"))
    return first, Stage(name="all", epochs=2, lr_factors={"": 0.5, "0": 0.05}, clip=0.5)


def test_b11_stages_freeze_and_give_each_part_its_rate() -> None:
    model = network()
    before = model[0].weight.detach().clone()
    seen: dict[str, tuple[bool, list[float], bool]] = {}

    def note(run: Trainer) -> None:
        same = torch.equal(run.model[0].weight, before) and bool((run.model[1].running_mean == 0).all())
        seen.setdefault(run.rig.stage.name, (same, run.rig.schedule.base_lrs, run.model[1].training))

    config = TrainConfig(learning_rate=2.5e-4, scheduler_type="onecycle")
    run = trainer(config, model=model, stages=two_stages(), before_step=note)
    history = run.train(*loaders())
    assert seen["head"] == (True, [2.5e-4], False), "frozen, statistics included"
    assert seen["all"][1:] == ([1.25e-5, 1.25e-4], True)
    assert not torch.equal(model[0].weight, before)
    assert [row["stage"] for row in history.epochs] == ["head", "head", "all", "all"]
    assert run.findings == []


def test_a_stage_that_names_nothing_or_freezes_all_is_told() -> None:
    with pytest.raises(InputError, match="names the part 'backbone', but no parameter name begins with it"):
        trainer(stages=[Stage(name="x", frozen=("backbone",))]).train(loaders()[0])
    with pytest.raises(InputError, match="freezes every parameter"):
        trainer(stages=[Stage(name="x", frozen=("0", "1", "3"))]).train(loaders()[0])
    with pytest.raises(InputError, match="same name"):
        trainer(stages=[Stage(name="x"), Stage(name="x")])


def staged(folder: Path, **how: Any) -> Trainer:
    config = TrainConfig(learning_rate=0.01, scheduler_type="onecycle", checkpoint_every=4, ema_decay=0.9)
    around = Surroundings(run_dir=False, checkpoint_dir=folder)
    return trainer(config, around, model=network(), stages=two_stages(), **how)


def killed(folder: Path, at: int) -> None:
    """Train until a step, and go without a word."""

    def kill(one: Trainer) -> None:
        if one.course.steps_done == at:
            os.kill(os.getpid(), signal.SIGKILL)

    staged(folder, before_step=kill).train(*loaders())


def same_end(whole: Trainer, again: Trainer) -> None:
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, again.model.state_dict()[name]), name
    for name, value in whole.last_rig.ema.state_dict().items():
        assert torch.equal(value, again.last_rig.ema.state_dict()[name]), name
    for column in ("train_loss", "val_loss", "num_steps", "learning_rates"):
        assert again.history.column(column) == whole.history.column(column)


@pytest.mark.parametrize("at", [5, 13, 21, 27])
def test_b29_resume_from_any_step_ends_with_the_same_weights(at: int, tmp_path: Path) -> None:
    """Interrupted in the first epoch, within an epoch, in the second stage: the end is that of the whole run."""
    whole = staged(tmp_path / "whole")
    whole.train(*loaders())

    def interrupt(one: Trainer) -> None:
        if one.course.steps_done == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        staged(tmp_path / "broken", before_step=interrupt).train(*loaders())
    again = staged(tmp_path / "broken")
    again.train(*loaders(), resume="auto")
    same_end(whole, again)


def test_b29_resume_after_sigkill_within_an_epoch(tmp_path: Path) -> None:
    whole = staged(tmp_path / "whole")
    whole.train(*loaders())
    code = "import sys, torch; torch.set_num_threads(1); from pathlib import Path; "
    code += f"from tests.train.test_trainer import killed; killed(Path({str(tmp_path / 'broken')!r}), 22)"
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    again = staged(tmp_path / "broken")
    again.train(*loaders(), resume="auto")
    same_end(whole, again)


def test_b18_resume_from_a_path_takes_optimizer_and_place(tmp_path: Path) -> None:
    config = TrainConfig(num_epochs=4, scheduler_type="none")
    run = trainer(config)
    run.train(*loaders())
    run.save_checkpoint(tmp_path / "four")
    more = trainer(replace(config, num_epochs=6))
    history = more.train(*loaders(), resume=tmp_path / "four")
    assert [row["epoch"] for row in history.epochs] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(OSError, match="does not exist"):
        trainer(config).train(*loaders(), resume=tmp_path / "five")
    with pytest.raises(InputError, match="give checkpoint_dir"):
        trainer(config).train(*loaders(), resume="auto")


def test_b17_b20_the_last_three_epochs_are_kept_and_the_best(tmp_path: Path) -> None:
    around = Surroundings(run_dir=False, checkpoint_dir=tmp_path)
    config = TrainConfig(num_epochs=6, scheduler_type="none", monitor="-val_loss")
    run = trainer(config, around)
    history = run.train(*loaders())
    kept = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("step-*"))
    assert kept[-3:] == [32, 40, 48]
    assert len(kept) <= 4
    best = trainer(config)
    assert best.load_checkpoint(tmp_path / "best_model")
    assert best.evaluate(loaders()[1])["loss"] == min(history.column("val_loss"))


def test_b19_history_json_survives_a_training_that_is_stopped(tmp_path: Path) -> None:
    train, val = loaders()
    around = Surroundings(run_dir=False, checkpoint_dir=tmp_path)

    def poison(run: Trainer) -> None:
        if run.course.epoch == 2:
            train.dataset.tensors[0][:] = math.nan

    run = trainer(TrainConfig(num_epochs=9, mode="raise"), around, before_step=poison)
    with pytest.raises(TrainingStopped, match="Training stopped due to NaN/Inf"):
        run.train(train, val)
    rows = json.loads((tmp_path / "history.json").read_text())
    assert [row["epoch"] for row in rows] == [1, 2]
    assert {"train_loss", "val_loss", "learning_rates", "grad_norm_avg", "memory_peak_bytes"} <= set(rows[0])
    assert rows[0]["memory_peak_bytes"] > 0


def test_the_control_arm_has_nothing_to_protect_it() -> None:
    train, val = loaders()
    train.dataset.tensors[0][7, 2] = math.nan
    run = trainer(TrainConfig(num_epochs=2), replace(QUIET, guarded=False))
    history = run.train(train, val)
    assert not bool(run.model[0].weight.isfinite().all())
    assert math.isnan(history.column("val_loss")[-1])
    assert run.monitor_training_health()["parameters_healthy"] is False


@pytest.mark.parametrize("kind", sampled(SCHEDULES, "cosine plateau"))
def test_d7_documented_corrections_survive_every_schedule(kind: str) -> None:
    """An explosion in epoch 3 cuts the rate to a tenth, and no schedule takes that back."""
    config = TrainConfig(num_epochs=7, scheduler_type=kind, corrective=True, learning_rate=1e-3)

    def run(*, explode: bool) -> Trainer:
        train, val = loaders()

        def shout(one: Trainer) -> None:
            if explode and one.course.epoch == 2 and one.course.micro == 1:
                one.course._sums += torch.tensor([1e4, 0.0, 0.0], dtype=torch.float64)

        one = trainer(config, before_step=shout)
        one.train(train, val)
        return one

    clean, loud = run(explode=False), run(explode=True)
    assert [row["issues"] for row in clean.history.epochs] == [[]] * 7
    assert loud.history.epochs[2]["issues"] == ["loss_explosion"]
    assert [outcome.action.args["factor"] for outcome in loud.outcomes] == [0.1]
    pairs = zip(clean.history.column("learning_rates"), loud.history.column("learning_rates"), strict=True)
    ratios = [b[0] / a[0] if a[0] > 1e-12 else None for a, b in pairs]
    assert ratios[:2] == pytest.approx([1.0, 1.0])
    if kind != "plateau":  # that one goes by losses, which differ
        assert [r for r in ratios[2:] if r is not None] == pytest.approx([0.1] * sum(r is not None for r in ratios[2:]))


@pytest.mark.parametrize(
    ("issue", "factor", "key"),
    [("train_loss_nan_inf", 0.5, "learning_rates"), ("val_loss_nan_inf", 0.5, "learning_rates")],
)
def test_d7_a_nan_in_training_or_validation_halves_the_rate(issue: str, factor: float, key: str) -> None:
    train, val = loaders()
    bad = train if issue.startswith("train") else val

    def poison(run: Trainer) -> None:
        begin = 7 if bad is train else 8  # the next epoch's first batch is fetched before its first step
        bad.dataset.tensors[0][3, 0] = math.nan if begin <= run.course.steps_done < begin + 8 else 0.0

    config = TrainConfig(num_epochs=3, scheduler_type="none", corrective=True)
    run = Trainer(network(), nn.functional.mse_loss, config, around=QUIET, before_step=poison)
    history = run.train(train, val)
    assert issue in history.epochs[1]["issues"]
    assert history.epochs[0][key][0] * factor == pytest.approx(history.epochs[1][key][0])


def test_d12_the_documented_tags_reach_a_logger() -> None:
    told: dict[str, list[float]] = {}

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            told.setdefault(tag, []).append(value)

    train, val = loaders()

    def poison(run: Trainer) -> None:
        train.dataset.tensors[0][3, 0] = math.nan if 7 <= run.course.steps_done < 15 else 0.0

    config = TrainConfig(num_epochs=3, scheduler_type="none", corrective=True)
    around = replace(QUIET, tags=Writer())
    Trainer(network(), nn.functional.mse_loss, config, around=around, before_step=poison).train(train, val)
    assert {"Training/GradNorm_Before", "Training/GradNorm_After", "Loss/Train", "Loss/Val_Epoch"} <= set(told)
    assert told["Training/CorrectiveAction"] == [1.0]
    assert told["Training/AdjustedLR"] == [pytest.approx(5e-4)]


def test_what_cannot_work_is_told() -> None:
    with pytest.raises(InputError, match="neither loss_fn"):
        Trainer(network())
    with pytest.raises(InputError, match="expected a pair"):
        trainer().train(DataLoader(torch.randn(8, 5), batch_size=4))


# -- the documented call ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [TrainConfig(num_epochs=1), {"num_epochs": 1}])
def test_d5_a_config_in_the_second_place_is_accepted_beside_a_loss(config: Any) -> None:
    loss = nn.functional.mse_loss
    for made in (
        Trainer(network(), config, loss, around=QUIET),
        Trainer(network(), loss, config, around=QUIET),
        Trainer(network(), config, step_fn=lambda model, batch: loss(model(batch[0]), batch[1]), around=QUIET),
    ):
        assert len(made.train(*loaders()).epochs) == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((TrainConfig(),), r"Trainer\(model, config\) has no loss; call Trainer\(model, loss_fn, config\)"),
        (({"num_epochs": 1},), r"has no loss; call Trainer\(model, loss_fn, config\)"),
        ((TrainConfig(), TrainConfig()), "loss_fn is a TrainConfig"),
        ((nn.functional.mse_loss, nn.functional.l1_loss), "config is a function; expected a TrainConfig"),
        (("mse",), "loss_fn is a str"),
    ],
)
def test_d5_another_call_is_refused_at_once_with_the_right_one(given: tuple[Any, ...], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Trainer(network(), *given, around=QUIET)


def test_the_trainer_is_a_public_name_and_takes_the_documented_name_of_the_best_model(tmp_path: Path) -> None:
    import trimtab

    assert trimtab.Trainer is Trainer
    around = Surroundings(run_dir=False, checkpoint_dir=tmp_path)
    first = trainer(TrainConfig(num_epochs=2), around)
    first.train(*loaders())
    second = trainer(TrainConfig(num_epochs=2))
    assert second.load_checkpoint(tmp_path / "best_model.pth", load_optimizer=False)
    assert not second.load_checkpoint(tmp_path / "other.pth")


@pytest.mark.parametrize("kind", in_ci(SCHEDULES, "cosine plateau"))
def test_early_stopping_helps_on_tiny_data_under_every_schedule(kind: str, tmp_path: Path) -> None:
    """The model memorises 48 rows: with patience it ends with its best weights, without it with overfitted ones."""
    recipe, given = load_recipe("tabular"), {"scheduler": kind}
    late = run_recipe(recipe, given, fault="tiny-data", run_dir=False)
    early = run_recipe(recipe, given | {"patience": 5}, fault="tiny-data", run_dir=False, checkpoint_dir=tmp_path)
    assert len(early.history) < len(late.history)
    assert early.score == max(row["r2"] for row in early.history if row["val_loss"] == early.metrics["val_loss"])
    assert early.metrics["val_loss"] == min(row["val_loss"] for row in early.history)
    assert early.score > late.score + 0.02


def test_with_patience_the_final_weights_are_the_best_also_after_a_resume(tmp_path: Path) -> None:
    data, val = loaders()
    config = TrainConfig(num_epochs=6, patience=5, learning_rate=0.5, scheduler_type="none", optimizer="sgd")
    run = trainer(config, replace(QUIET, checkpoint_dir=tmp_path))
    history = run.train(data, val)
    best = min(history.epochs, key=lambda row: row["val_loss"])
    assert run.final_row is not None
    assert run.final_row["val_loss"] == best["val_loss"]
    assert run.evaluate(val)["loss"] == pytest.approx(best["val_loss"])
    again = trainer(config, replace(QUIET, checkpoint_dir=tmp_path))
    again.train(*loaders(), resume="auto")
    assert again.final_row is not None
    assert again.evaluate(val)["loss"] == pytest.approx(best["val_loss"])
