from __future__ import annotations

import dataclasses
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from trimtab.core.errors import InputError
from trimtab.core.presets import get_preset
from trimtab.doctor.examine import examine
from trimtab.train.recipe import Result, build_parts, run_recipe, settings_of
from trimtab.train.recipes import load_recipe, pairs
from trimtab.train.recipes.pairs import data as pairs_data
from trimtab.train.recipes.pairs import model as pairs_loss
from trimtab.train.recipes.pairs import reporting as pairs_check

RECIPE = load_recipe("pairs")
GRAD = re.compile(
    r"\[GRAD\] Step +(\d+) \| Global: \d\.\d\de[+-]\d\d \| Zero: 0/\d+ \| NaN/Inf: 0/\d+ \| Max: \S+ \| Avg: \S+ \| "
    r"Range: \[\S+, \S+\]"
)
TINY: dict[str, Any] = {"num_pairs": 320, "pretrain_epochs": 1, "epochs": 1, "width": 16, "heads": 2}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def go(fault: str | None = None, *, guarded: bool = True, **given: Any) -> tuple[Result, list[str]]:
    said: list[str] = []
    result = run_recipe(RECIPE, {**TINY, **given}, fault=fault, guarded=guarded, run_dir=False, say=said.append)
    return result, said


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[str], Path]:
    torch.set_num_threads(1)
    out, said = tmp_path_factory.mktemp("pairs"), list[str]()
    given = {"num_pairs": 960, "pretrain_epochs": 4, "epochs": 1, "output_dir": str(out)}
    return run_recipe(RECIPE, given, run_dir=False, say=said.append), said, out


def test_e22_a_clean_run_answers_pairs_it_never_saw_and_is_silent(clean: Any) -> None:
    result, _, _ = clean
    assert result.findings == ()
    assert result.actions == ()
    assert result.score > 0.7
    assert result.facts["swap_consistency"] > 0.85
    assert all(result.facts[f"accuracy_{name}"] > 0.5 for name in pairs_data.ANSWERS)


def test_e9_e13_a_gradient_line_every_tenth_step_and_a_memory_line_every_hundredth(clean: Any) -> None:
    result, said, _ = clean
    steps = [int(match[1]) for match in map(GRAD.fullmatch, said) if match]
    assert steps == [*range(0, 120, 10), *range(0, 30, 10)], "each stage counts from 0"
    assert [line for line in said if "NaN/Inf" in line and not GRAD.fullmatch(line)] == []
    assert len([line for line in said if line.startswith("[MEM] Step  100 |")]) == 1
    assert result.num_steps == 150


def test_e8_e15_e16_e18_banner_groups_health_report_and_memory_peaks(clean: Any) -> None:
    result, said, _ = clean
    assert said[1] == "Device & Environment Banner"
    assert any("amp_dtype none, clip_grad_norm 1.0" in line for line in said)
    assert [line for line in said if line.startswith("tune: group")] == [
        "tune: group 0: 34 parameters, learning rate 2e-06, weight decay 0.1; 0.0002 at its peak",
        "tune: group 1: 4 parameters, learning rate 2e-07, weight decay 0.1; 2e-05 at its peak",
    ]
    at = said.index("TRAINING HEALTH REPORT")
    assert said[at + 2] == "Training healthy: YES"
    assert said[at + 3].startswith("Gradient norm: average")
    assert said[at + 5].startswith("Per-class accuracy: First 0.")
    assert len([line for line in said if re.match(r"(pretrain|tune) epoch \d: memory peak \d+ MiB", line)]) == 5
    assert all(epoch["memory_peak_bytes"] > 0 for epoch in result.history)


def test_e9_the_output_folder_holds_everything(clean: Any) -> None:
    result, _, out = clean
    report = json.loads((out / "health_report.json").read_text())
    assert report["training_healthy"] is True
    assert report["metrics"]["per_class_accuracy"].keys() == set(pairs_data.ANSWERS)
    assert len(json.loads((out / "history.json").read_text())) == len(result.history) == 5
    assert json.loads((out / "settings.json").read_text())["w_sim"] == 1.2
    assert load_file(out / "model.safetensors")["head.weight"].shape == (3, 64)
    assert [path.name for path in sorted((out / "checkpoints").iterdir()) if path.is_dir()][:2] == [
        "1-pretrain",
        "2-tune",
    ]


def test_e22_the_documented_constants(clean: Any) -> None:
    settings = settings_of(RECIPE, {})
    documented = {"learning_rate": 2e-4, "projector_lr": 2e-5, "weight_decay": 0.1, "batch_size": 32, "epochs": 3}
    documented |= {"patience": 5, "w_sim": 1.2, "clip_grad_norm": 1.0}
    assert {name: settings[name] for name in documented} == documented
    parts = build_parts(RECIPE, settings)
    tuned = 3 * len(parts.train_loader)
    assert (parts.config.warmup_steps, parts.config.min_lr_ratio) == (round(0.05 * tuned), 0.01)
    assert [stage.name for stage in parts.stages] == ["pretrain", "tune"]
    result, _, _ = clean
    rates = sorted(result.history[-1]["learning_rates"])
    assert rates == pytest.approx([2e-7, 2e-6], rel=0.02), "each group ends at a hundredth of its own rate"
    assert result.history[-1]["weight_decay"] == 0.1
    hints = get_preset("lmol").hints
    assert (hints["base_lr"], hints["projector_lr"]) == (settings["learning_rate"], settings["projector_lr"])
    assert (hints["warmup_frac"], hints["min_lr_frac"]) == (pairs.WARMUP_RATIO, pairs.MIN_LR_RATIO)


def test_e22_class_weights_and_the_ramp_of_the_swap_term() -> None:
    assert [pairs_loss.ramp(x) for x in (0.0, 0.1, 0.5, 1.0)] == [5.0, 8.0, 20.0, 20.0]
    scores = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]])
    weighed = nn.functional.cross_entropy(scores, torch.tensor([1, 2]), weight=torch.tensor([1.0, 1.0, 1.2]))
    assert torch.equal(pairs_loss.PairLoss().answers(scores, torch.tensor([1, 2])), weighed)
    apart = pairs_loss.swap_divergence(scores, scores)
    p, q = scores.softmax(-1), scores[:, [1, 0, 2]].softmax(-1)
    assert apart.item() == pytest.approx(float(0.5 * ((p - q) * (p / q).log()).sum() / 2), rel=1e-5)
    batch = {
        "first": torch.rand(4, 1),
        "second": torch.rand(4, 1),
        "prompt": None,
        "labels": torch.tensor([0, 1, 2, 0]),
    }
    told = torch.randn(4, 2, 3)
    loss = pairs_loss.PairLoss()
    values = []
    for done in (None, 0.0, 1.0):
        loss.done_frac = lambda done=done: done
        values.append(float(loss(lambda *a, both: told, batch)))
    gap = float(pairs_loss.swap_divergence(told[:, 0], told[:, 1]))
    assert values[2] - values[1] == pytest.approx(15.0 * gap, rel=1e-4)
    exchanged = torch.cat([batch["labels"], torch.tensor([1, 0, 2, 1])])
    assert values[0] == pytest.approx(float(loss.answers(told.transpose(0, 1).flatten(0, 1), exchanged)))


def test_the_question_matters_and_no_held_out_image_is_trained_on() -> None:
    parts = build_parts(RECIPE, settings_of(RECIPE, {"num_pairs": 2400}))
    train, held = parts.train_loader.dataset.asked, parts.val_loader.dataset.asked
    seen = set(torch.cat([train.first, train.second]).tolist())
    assert seen.isdisjoint(torch.cat([held.first, held.second]).tolist())
    assert train.labels.bincount().tolist() == [800, 800, 800]
    _, told = pairs_data.digits(42)
    one, other = train.first, train.second
    answers = torch.stack(
        [pairs_data.answer(s * (told[n][one] - told[n][other])) for _, n, s in pairs_data.DIGIT_QUESTIONS]
    )
    clear = (answers >= 0).all(0)
    assert (answers[:, clear] != answers[0, clear]).any(0).float().mean() > 0.8, "one pair, several answers"


def test_emoji_are_pairs_too() -> None:
    result, _ = go(data="emoji", max_steps=4)
    assert result.num_steps == 4
    assert math.isfinite(result.score)


@pytest.mark.parametrize(
    ("fault", "finding", "action"),
    [
        ("nan-pixel", "nonfinite-input", "samples of the batch aside"),
        ("lr-10", "update-ratio", "roll the weights back"),
        ("bit-flip", "weight-corrupted", "roll the weights back"),
    ],
)
def test_each_fault_is_answered_and_ruins_the_control_arm(fault: str, finding: str, action: str) -> None:
    # What is usual must be known first; and with patience the weights of the best epoch would be left of a ruined run.
    given = {"num_pairs": 1280 if fault == "bit-flip" else 320, "patience": 0}
    held, _ = go(fault, **given)
    assert finding in held.findings
    assert [line for line in held.actions if action in line], held.actions
    assert held.weights_finite
    assert math.isfinite(held.metrics["val_loss"])
    bare, _ = go(fault, guarded=False, **given)
    assert bare.findings == ()
    assert not bare.metrics["val_loss"] < 5.0 * held.metrics["val_loss"], "NaN, or far off"


# -- the flags -------------------------------------------------------------------------------------------------------


def test_e9_dry_run_builds_and_checks_and_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs_check, "examine", partial(examine, select=["OPT", "WIRE001"]))
    result, said = go(dry_run=True)
    assert (result.num_steps, result.history, result.stopped) == (0, (), None)
    assert any(re.match(r"dry run: \d+ checks passed, 0 did not", line) for line in said)
    stopped, said = go(dry_run=True, learning_rate=1e-12, projector_lr=1e-13, pretrain_lr=0.0, pretrain_epochs=0)
    assert stopped.stopped is not None
    assert "learning-rate" in stopped.stopped


def test_e9_debug_says_more(clean: Any) -> None:
    _, said = go(debug=True, max_steps=3)
    assert any("[DEBUG]   head.weight [3, 16] float32: learns" in line for line in said)
    assert [int(m[1]) for m in map(GRAD.fullmatch, said) if m] == [0, 1, 2]
    assert not [line for line in clean[1] if "DEBUG" in line]


def test_e9_deterministic_is_set_and_put_back() -> None:
    seen: list[tuple[bool, bool]] = []
    parts = build_parts(RECIPE, settings_of(RECIPE, {**TINY, "deterministic": True, "cudnn_benchmark": True}))
    inner = parts.step_fn

    def watched(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append((torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark))
        assert inner is not None
        return inner(model, batch)

    recipe = dataclasses.replace(RECIPE, build=lambda settings: dataclasses.replace(parts, step_fn=watched))
    run_recipe(recipe, {"deterministic": True, "cudnn_benchmark": True, "max_steps": 2, **TINY}, run_dir=False)
    assert set(seen) == {(True, False)}
    assert not torch.are_deterministic_algorithms_enabled()
    broken = dataclasses.replace(parts, step_fn=lambda model, batch: 1 / 0)
    recipe = dataclasses.replace(RECIPE, build=lambda settings: broken)
    with pytest.raises(ZeroDivisionError):
        run_recipe(recipe, TINY, run_dir=False)
    assert not torch.are_deterministic_algorithms_enabled()


def test_e9_without_a_compiler_training_goes_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_compiler(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no C++ compiler found")

    monkeypatch.setattr(nn.Module, "compile", no_compiler)
    result, said = go(compile=True, max_steps=2)
    assert any(
        "compile: not possible here (RuntimeError: no C++ compiler found); training continues" in s for s in said
    )
    assert result.num_steps == 2


def test_e9_mixed_precision_and_clipping_off() -> None:
    result, _ = go(amp_dtype="bf16", clip_grad_norm=0.0, max_steps=6)
    assert result.num_steps == 6
    assert all(epoch["clipped_frac"] == 0.0 for epoch in result.history)


# -- your own pairs --------------------------------------------------------------------------------------------------


def arrays(num: int = 60) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    at = rng.integers(0, 20, (num, 2))
    return {
        "images": rng.integers(0, 256, (20, 6, 5, 3), dtype=np.uint8),
        "pairs": at,
        "questions": np.array(["Which is brighter", "which is larger"] * (num // 2)),
        "labels": rng.integers(0, 3, num),
        "held_out": np.arange(20) >= 12,
    }


def test_e9_the_users_own_pairs(tmp_path: Path) -> None:
    np.savez(tmp_path / "pairs.npz", **arrays())
    result, _ = go(data_dir=str(tmp_path), batch_size=4)
    assert result.num_steps > 0
    assert {f"accuracy_{name}" for name in pairs_data.ANSWERS} < result.facts.keys()
    given = arrays()
    del given["held_out"]
    np.savez(tmp_path / "other.npz", **given)
    parts = build_parts(RECIPE, settings_of(RECIPE, {"data_dir": str(tmp_path / "other.npz"), "batch_size": 2}))
    train, held = parts.train_loader.dataset.asked, parts.val_loader.dataset.asked
    assert set(train.first.tolist()).isdisjoint(held.first.tolist())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"labels": np.full(60, 3)}, "labels has 3 in row 0; expected 0 (First), 1 (Second) or 2 (Similar)"),
        ({"pairs": np.full((60, 2), 20)}, "pairs has 20 in row 0; expected the number of an image, from 0 to 19"),
        ({"labels": np.zeros(60)}, "labels are of float64; expected whole numbers"),
        ({"questions": np.array(["a", ""] * 30)}, "question 1 is empty"),
        ({"questions": np.array(["a"])}, "[60, 2], labels [60] and 1 questions"),
        ({"images": np.zeros((20, 3))}, "images are [20, 3] of float64"),
        ({"held_out": np.zeros(20, bool)}, "0 of held-out images"),
        ({"images": None}, "lacks images; it holds pairs, questions, labels, held_out"),
    ],
)
def test_e9_a_wrong_file_is_told(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    given = {key: value for key, value in {**arrays(), **change}.items() if value is not None}
    np.savez(tmp_path / "pairs.npz", **given)
    with pytest.raises(InputError, match=re.escape(told)):
        go(data_dir=str(tmp_path))


def test_e9_no_file_and_no_pickle(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"pairs\.npz cannot be read"):
        go(data_dir=str(tmp_path))
    np.savez(tmp_path / "pairs.npz", **{**arrays(), "questions": np.array([object()] * 60)})
    with pytest.raises(InputError, match="allow_pickle"):
        go(data_dir=str(tmp_path))
    with pytest.raises(InputError, match="too few for one batch"):
        go(num_pairs=12, batch_size=64)
    assert pairs.target()["step_fn"] is not None
