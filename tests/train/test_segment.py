"""The two-stage segmentation: stages, rates, lines, faults, and what the document's own trainer got wrong."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.train.test_cli_train import call  # noqa: F401 a fixture
from trimtab.core.errors import InputError
from trimtab.train.recipe import Result, build_parts, doctor_target, run_recipe, settings_of
from trimtab.train.recipes import load_recipe
from trimtab.train.recipes.segment import target
from trimtab.train.recipes.segment.data import compose, texture_crops
from trimtab.train.recipes.segment.metrics import segmentation_loss
from trimtab.train.recipes.segment.model import Segmenter
from trimtab.train.recipes.segment.stages import Wanted, pretrain
from trimtab.train.stages import Surroundings, make_optimizer
from trimtab.train.trainer import Trainer

RECIPE = load_recipe("segment")
TINY = {"num_images": 16, "img_size": 16, "batch_size": 2, "epochs": 3, "stage1_epochs": 1}
TINY |= {"pretrain_epochs": 0, "num_experts": 2, "lr": 0.004}
SMALL = TINY | {"num_images": 96, "img_size": 24, "batch_size": 4, "epochs": 5, "stage1_epochs": 3, "lr": None}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    torch.set_num_threads(1)


def go(fault: str | None = None, *, guarded: bool = True, small: bool = False, **given: Any) -> Result:
    how = {name: given.pop(name) for name in ("say", "checkpoint_dir", "resume") if name in given}
    settings = (SMALL if small else TINY) | given
    return run_recipe(RECIPE, settings, fault=fault, guarded=guarded, run_dir=False, **how)


def trainer_of(**given: Any) -> tuple[Trainer, Any]:
    parts = build_parts(RECIPE, settings_of(RECIPE, TINY | given))
    around = Surroundings(run_dir=False)
    how = {"evaluate": parts.evaluate, "stages": parts.stages, "around": around}
    return Trainer(parts.model, parts.loss_fn, parts.config, **how), parts


@pytest.fixture(scope="module")
def clean() -> Result:
    return go(small=True)


# -- data ------------------------------------------------------------------------------------------------------------


def test_scenes_are_exact_seeded_and_camouflaged() -> None:
    scenes = compose(24, 48, seed=5)
    assert set(np.unique(scenes.masks)) == {0.0, 1.0}
    assert all(0.08 < frac < 0.6 for frac in scenes.masks.mean((1, 2, 3)))
    np.testing.assert_array_equal(scenes.images, compose(24, 48, seed=5).images)
    assert not np.array_equal(scenes.images, compose(24, 48, seed=6).images)
    inside, outside = [], []
    for image, mask in zip(scenes.images, scenes.masks, strict=True):
        inside.append(image[:, mask[0] == 1].mean(1))
        outside.append(image[:, mask[0] == 0].mean(1))
    gap = np.abs(np.array(inside) - np.array(outside)).mean()
    assert gap < 0.35 * scenes.images.std(), "colour and brightness give no object away"


def test_held_out_scenes_are_composed_from_other_parts_of_the_pictures() -> None:
    from trimtab.train.recipes.segment.data import _sources

    train, held = _sources(held_out=False), _sources(held_out=True)
    assert train.keys() == held.keys()
    for name, left in train.items():
        right = held[name]
        assert left.shape[2] + right.shape[2] in (192,), name
        assert left.shape[2] >= 64 <= right.shape[2] + 1


def test_b22_sizes_that_cannot_be_are_told() -> None:
    with pytest.raises(InputError, match="img_size is 50; expected a multiple of 4 from 16 to 64"):
        compose(2, 50, seed=1)
    with pytest.raises(InputError, match="stage1_epochs is 3 of 3 epochs; expected 0 or more, and fewer"):
        go(stage1_epochs=3)
    for name, value in {"num_images": 1, "num_experts": 0, "img_size": 8, "batch_size": 0, "stage1_epochs": -1}.items():
        with pytest.raises(InputError, match=f"{name} is {value}; expected at least"):
            go(**{name: value})


def test_the_backbone_is_pretrained_on_textures_and_draws_no_random_numbers() -> None:
    x, y = texture_crops(40, 16, seed=1)
    assert x.shape == (40, 3, 16, 16)
    assert set(y) <= set(range(9))
    backbone = Segmenter((8, 8, 8), 2).backbone
    before = {name: one.clone() for name, one in backbone.state_dict().items()}
    state, said = torch.get_rng_state(), []
    wanted = Wanted(channels=(8, 8, 8), side=16, epochs=2, seed=1, device="cpu")
    accuracy = pretrain(backbone, wanted, said.append)
    assert torch.equal(state, torch.get_rng_state())
    assert said[0].startswith("Stage 0 (pretrain): the backbone learns")
    losses = [float(found[1]) for line in said if (found := re.fullmatch(r"Loss: (\S+) \| Accuracy: \d\.\d{4}", line))]
    assert losses[1] < 0.97 * losses[0]
    assert any(not torch.equal(before[name], one) for name, one in backbone.state_dict().items())
    again, num = Segmenter((8, 8, 8), 2).backbone, len(said)
    assert pretrain(again, wanted, said.append) == accuracy
    assert len(said) == num, "made once in a process"
    assert all(torch.equal(one, again.state_dict()[name]) for name, one in backbone.state_dict().items())


# -- stages and rates ------------------------------------------------------------------------------------------------


def test_b1_b11_a_normal_run_enters_stage_2_and_only_there_the_backbone_learns() -> None:
    """The original never got there: its set-up was only reached by resuming."""
    trainer, parts = trainer_of()
    weights, statistics = [], []
    name, norm = "backbone.levels.0.0.conv.weight", "backbone.levels.0.0.norm.running_mean"
    state = trainer.model.state_dict()

    def note(one: Trainer) -> None:
        weights.append((one.rig.stage.name, state[name].clone()))
        statistics.append(state[norm].clone())

    trainer._before = note
    trainer.train(parts.train_loader, parts.val_loader)
    stages = [stage for stage, _ in weights]
    assert stages == ["head"] * 2 + ["all"] * 4
    assert torch.equal(weights[0][1], weights[2][1])
    assert torch.equal(statistics[0], statistics[1]), "frozen statistics stay, too"
    assert not torch.equal(weights[2][1], weights[5][1])
    assert trainer.findings == []


def test_b11_b13_the_backbone_learns_at_a_tenth_of_the_head_at_the_peak() -> None:
    result = go(lr=0.00025, epochs=6, stage1_epochs=2)
    peaks = result.facts["peak_lr"]
    assert peaks["head"] == {"head": pytest.approx(0.00025, rel=0.1)}
    assert peaks["all"]["head"] == pytest.approx(0.000125, rel=0.1)
    assert peaks["all"]["backbone"] / peaks["all"]["head"] == pytest.approx(0.1, rel=1e-3)
    # The control: one scalar as max_lr, as in the original, makes both the same.
    parts = build_parts(RECIPE, settings_of(RECIPE, TINY))
    optimizer = make_optimizer(parts.model, parts.stages[1], parts.config)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.000125, total_steps=10, pct_start=0.5)
    highest = [0.0, 0.0]
    for _ in range(10):
        optimizer.step()
        highest = [max(was, group["lr"]) for was, group in zip(highest, optimizer.param_groups, strict=True)]
        if schedule.last_epoch < 9:
            schedule.step()
    assert highest[0] == highest[1]


def test_b13_the_rate_changes_with_every_step_not_once_an_epoch() -> None:
    trainer, parts = trainer_of(epochs=5)
    seen: list[float] = []
    trainer._before = lambda one: seen.append(one.rig.schedule.rates[0]) if one.rig.stage.name == "all" else None
    trainer.train(parts.train_loader, parts.val_loader)
    assert len(seen) == 8
    assert len(set(seen)) == 8


@pytest.mark.parametrize("flag", ["progressive_unfreeze", "skip_stage1"])
def test_b23_other_orders_of_unfreezing(flag: str) -> None:
    result = go(epochs=5, **{flag: True})
    stages = [row["stage"] for row in result.history]
    assert stages == (["head"] + ["top"] * 2 + ["all"] * 2 if flag == "progressive_unfreeze" else ["all"] * 4)
    assert result.findings == ()


def test_b23_rates_schedules_and_averages_are_taken() -> None:
    settings = settings_of(RECIPE, TINY | {"stage2_lr": 0.001, "scheduler": "cosine_restart", "min_lr": 1e-5})
    parts = build_parts(RECIPE, settings | {"warmup_epochs": 1, "t_mult": 2, "use_ema": True, "ema_decay": 0.9})
    assert parts.stages[1].learning_rate == 0.001
    config = parts.config
    assert (config.scheduler_type, config.min_lr, config.t_mult) == ("cosine_restart", 1e-5, 2)
    assert (config.warmup_steps, config.ema_decay) == (2, 0.9)
    with pytest.raises(InputError, match="expected numbers above 0"):
        build_parts(RECIPE, settings | {"stage2_lr": -1.0})


# -- precision, clipping, experts, checkpointing ---------------------------------------------------------------------


def test_b10_b14_clip_of_a_half_once_per_step_and_a_tail_of_its_own() -> None:
    assert settings_of(RECIPE, {})["grad_clip"] == 0.5
    result = go(num_images=12, use_ema=True)  # six batches: a group of four and one of two
    assert [row["num_steps"] for row in result.history] == [2, 2, 2]
    assert all(row["clipped_frac"] == 1.0 for row in result.history)


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"no_amp": True, "amp_dtype": "fp16"}, None)])
def test_b23_no_amp_and_none_by_itself_on_a_cpu(given: dict[str, Any], expected: Any) -> None:
    settings = settings_of(RECIPE, TINY | given) | {"device": "cpu"}
    assert build_parts(RECIPE, settings).config.use_amp is (expected is not None)


def test_b12_float16_has_the_conservative_scaler_in_stage_2() -> None:
    trainer, parts = trainer_of(amp_dtype="fp16", num_images=8, epochs=2)
    trainer.train(parts.train_loader, parts.val_loader)
    scaler = trainer.last_rig.scaler
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (1.5, 0.5, 1000)
    assert scaler.get_scale() == 2.0**10
    assert trainer.history.column("train_loss")[-1] < 12


def test_an_overflow_of_the_scaler_is_routine_and_no_alarm() -> None:
    """The original stopped for good at the first one."""
    result = go("scaler-overflow", num_images=32, use_ema=True)
    assert result.findings == ()
    assert result.stopped is None
    assert result.history[-1]["rejected"] > 0, "steps were skipped"
    assert result.weights_finite


def test_b22_the_experts_are_really_there_and_all_learn() -> None:
    model = Segmenter((4, 4, 4), num_experts=7)
    segmentation_loss(model(torch.randn(2, 3, 16, 16)), torch.ones(2, 1, 16, 16)).backward()
    assert len(model.head.experts.experts) == 7
    assert all(one.weight.grad.abs().sum() > 0 for one in model.head.experts.experts)
    assert model.head.experts.gate.weight.grad.abs().sum() > 0
    predicted = model.eval()(torch.randn(2, 3, 16, 16))
    assert 0 <= predicted.imbalance.item() < 7


def test_b22_gradient_checkpointing_changes_no_gradient_and_deep_supervision_does() -> None:
    """In the original every wrapped module would have called the last one's forward."""
    grads = []
    for flags in ({}, {"gradient_checkpointing": True}, {"deep_supervision": True}):
        parts = build_parts(RECIPE, settings_of(RECIPE, TINY | flags))
        images, masks = next(iter(parts.train_loader))
        parts.loss_fn(parts.model(images), masks).backward()
        grads.append({name: p.grad for name, p in parts.model.named_parameters()})
    plain, recomputed, deep = grads
    assert plain.keys() == recomputed.keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)
    assert deep.keys() - plain.keys() == {f"head.deep_scores.{i}.{what}" for i in (0, 1) for what in ("weight", "bias")}
    assert go(gradient_checkpointing=True, deep_supervision=True).findings == ()


# -- lines -----------------------------------------------------------------------------------------------------------


def test_b3_b5_b7_b8_the_documented_lines_and_numbers() -> None:
    said: list[str] = []
    result = go(say=said.append, grad_clip=0.01)
    assert [
        line for line in said if re.fullmatch(r"Epoch 3/3: 100%\|████\| 8/8 \[.*, loss=\d\.\d\d, grad=[\d.]+\]", line)
    ]
    assert [line for line in said if re.fullmatch(r"   Gradient norm - Avg: \d+\.\d{3}, Max: \d+\.\d{3}", line)]
    assert [line for line in said if re.fullmatch(r"Loss: \d+\.\d{4} \| IoU: \d\.\d{4} \| Dice: \d\.\d{4}", line)]
    assert [line for line in said if re.fullmatch(r"⚠️  High gradient norm detected: [\d.]+ \(clipped to 0\.01\)", line)]
    assert "Stage 1/2 (head): 1 epochs, backbone frozen; peak learning rates: head 0.004" in said
    assert "Stage 2/2 (all): 2 epochs; peak learning rates: backbone 0.0002, head 0.002" in said
    assert {"IoU", "Dice", "grad_norm_avg", "grad_norm_max", "learning_rates"} <= set(result.history[0])
    assert {"MAE", "F-measure", "S-measure", "E-measure", "Specificity"} <= set(result.facts)
    assert result.facts["goal: IoU of at least 0.72"] in ("reached", "missed")


def test_b6_b9_b19_mode_raise_stops_with_the_documented_words_and_says_how_to_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    result = go("inf-pixel", mode="raise", say=said.append, checkpoint_dir=tmp_path)
    assert result.stopped is not None
    assert result.stopped.startswith(("Training stopped due to NaN/Inf loss.", "Training stopped due to NaN/Inf grad"))
    assert any(re.match(r"❌ NaN/Inf detected in gradients at batch \d+!", line) for line in said)
    assert "   This indicates gradient explosion." in "\n".join(said)
    assert re.match(r"trimtab train segment --resume best --lr [\d.e-]+ --grad-clip 0\.3", result.facts["to go on"])
    rows = json.loads((tmp_path / "history.json").read_text())
    assert [row["stage"] for row in rows] == ["head", "all"]


# -- faults ----------------------------------------------------------------------------------------------------------


def test_b2_b4_an_infinite_pixel_costs_one_step_and_without_a_guard_everything(clean: Result) -> None:
    held, bare = go("inf-pixel", small=True), go("inf-pixel", small=True, guarded=False)
    assert (clean.findings, clean.rejected, clean.actions) == ((), 0, ())
    assert held.rejected == 1
    assert {"nonfinite-input", "nonfinite-loss", "nonfinite-gradient"} == set(held.findings)
    assert held.weights_finite
    assert abs(held.score - clean.score) < 0.12, "so small a run is noisy"
    assert not bare.weights_finite
    assert bare.score == 0.0


def test_a_rate_of_1_in_stage_2_is_rolled_back_to_before_its_first_step() -> None:
    """The original printed advice; here the stage begins again, at a rate that does not throw it."""
    held, bare = go("stage2-lr", small=True, seed=1), go("stage2-lr", small=True, seed=1, guarded=False)
    assert any("weights, buffers and optimizer state are the initial ones again" in a for a in held.actions)
    assert held.stopped is None
    assert held.score > 0.5 > bare.score


def test_masks_with_a_nan_are_put_aside() -> None:
    held = go("nan-mask")
    assert "nonfinite-loss" in held.findings
    assert any("samples of the batch aside" in action for action in held.actions)
    assert held.weights_finite
    assert not go("nan-mask", guarded=False).weights_finite


def test_faults_that_do_not_fit_are_told() -> None:
    with pytest.raises(InputError, match="stage 2 has 1 epochs of 8 batches; the fault is in epoch 2, batch 5"):
        go("inf-pixel", epochs=2)


# -- everything else -------------------------------------------------------------------------------------------------


def test_b22_the_documented_command_line(call: Any, tmp_path: Path) -> None:  # noqa: F811
    flags = "--resume auto --backbone conv-small --num-experts 3 --batch-size 2 --accumulation-steps 4 --img-size 16"
    flags += " --epochs 2 --stage1-epochs 1 --lr 0.00025 --weight-decay 0.0001 --grad-clip 0.5 --deep-supervision"
    flags += " --gradient-checkpointing --use-ema --device cpu --num-workers 0 --seed 42 --num-images 8 --json"
    said = call(
        "segment", *flags.split(), "--pretrain_epochs", "0", "--checkpoint-dir", tmp_path, "--run-dir", tmp_path
    )
    assert said.code == 0, said.err
    (one,) = json.loads(said.out)["runs"]
    assert [row["stage"] for row in one["history"]] == ["head", "all"]
    assert (tmp_path / "best_model").is_dir()


def test_a_healthy_run_has_no_findings_however_often_it_is_clipped(clean: Result) -> None:
    """The original's early warning and its 'average norm below 0.5' would have been raised in most epochs."""
    assert clean.findings == ()
    assert min(row["clipped_frac"] for row in clean.history) > 0.5


def test_a_doctor_can_look_at_it() -> None:
    found = doctor_target(RECIPE, TINY)
    images, masks = next(iter(found["loader"]))
    assert found["loss_fn"](found["model"](images), masks).isfinite()
    assert target.__doc__ is not None


def test_two_runs_of_one_seed_are_the_same_run() -> None:
    first, second = go(), go()
    assert first.metrics == second.metrics
    assert math.isfinite(first.metrics["val_loss"])
    assert go(seed=7).metrics != first.metrics


def test_a_model_on_another_device_is_told_apart_from_none() -> None:
    with pytest.raises(InputError, match="device is 'gpu'"):
        run_recipe(RECIPE, TINY | {"device": "gpu"}, run_dir=False)
    parts = build_parts(RECIPE, settings_of(RECIPE, TINY | {"device": "cpu"}))
    assert replace(parts.config, device="cpu").device == "cpu"
    assert isinstance(parts.model, nn.Module)
