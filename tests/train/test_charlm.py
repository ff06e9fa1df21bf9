from __future__ import annotations

import json
import math
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from trimtab.core.errors import InputError
from trimtab.core.presets import get_preset, warmup_lr
from trimtab.train.recipe import Result, build_parts, doctor_target, run_recipe, settings_of
from trimtab.train.recipes import charlm, load_recipe
from trimtab.train.recipes.charlm.text import reference

RECIPE = load_recipe("charlm")
LINE = re.compile(
    r"\[Step (\d+)\] Loss: \d+\.\d{4} \| Grad norm: \d+\.\d{4} -> (\d+\.\d{4}) \(clipped: (YES|NO)\) \| "
    r"Param norm: \d+\.\d{4} \| LR: (\d\.\d{6})"
)
SMALL = {"steps": 60, "d_model": 32, "layers": 1, "d_ff": 64, "seq": 16, "sample_length": 8}


def go(fault: str | None = None, *, guarded: bool = True, **given: Any) -> tuple[Result, list[str]]:
    said: list[str] = []
    result = run_recipe(RECIPE, given, quick=True, fault=fault, guarded=guarded, run_dir=False, say=said.append)
    return result, said


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, list[str], list[dict[str, Any]]]:
    path = tmp_path_factory.mktemp("charlm") / "training_metrics.jsonl"
    torch.set_num_threads(1)
    result, said = go(metrics_file=str(path))
    return result, said, [json.loads(line) for line in path.read_text().splitlines()]


def test_c4_the_line_of_every_tenth_step_to_the_letter(clean: Any) -> None:
    result, said, _ = clean
    lines = [LINE.fullmatch(line) for line in said if line.startswith("[Step")]
    assert all(lines), said
    assert [int(match[1]) for match in lines] == list(range(0, result.num_steps, 10))
    assert all(float(match[2]) <= 1.5 for match in lines)
    assert {match[3] for match in lines} == {"YES", "NO"}, "clipped at first, and not for ever"


def test_c6_the_rates_in_the_lines_are_those_of_the_formula(clean: Any) -> None:
    _, said, _ = clean
    hints = {"base_lr": 1e-3, "warmup_init_lr": 1e-6, "warmup_steps": 80}
    seen = [(int(m[1]), m[4]) for m in map(LINE.fullmatch, said) if m and int(m[1]) <= 80]
    assert seen == [(step, f"{warmup_lr(hints, step):.6f}") for step, _ in seen]


def test_c12_clipping_becomes_less_frequent_and_the_loss_falls(clean: Any) -> None:
    result, _, _ = clean
    assert result.facts["clipped_first"] > 0.2
    assert result.facts["clipped_last"] < 0.05
    assert result.score < 3.0 < math.log(90)
    assert result.findings == ()


def test_c7_the_metrics_file(clean: Any) -> None:
    result, _, lines = clean
    assert lines[0]["command"] == "init"
    assert lines[0]["config"]["base_lr"] == 1e-3
    assert lines[-1] == {"command": "finish"}
    steps = lines[1:-1]
    assert all(set(line) == {"step", "metrics"} for line in steps)
    names = {name for line in steps for name in line["metrics"]}
    assert names == {
        "train/loss",
        "train/learning_rate",
        "train/epoch",
        "train/epoch_avg_loss",
        "train/total_time_seconds",
        "samples/prompt",
        "samples/text",
    }
    first = [line["step"] for line in steps if "train/loss" in line["metrics"]]
    assert first == list(range(0, result.num_steps, 10))


def test_c13_the_documented_shape_and_rates_are_a_preset() -> None:
    settings = settings_of(RECIPE, {"metrics_file": "", "preset": "documented"})
    shape = {"d_model": 128, "layers": 4, "heads": 4, "d_ff": 512, "max_seq": 64, "seq": 32, "batch_size": 8}
    assert {name: settings[name] for name in shape} == shape
    hints = get_preset("mlp-cuda").hints
    assert (settings["base_lr"], settings["warmup_steps"]) == (hints["base_lr"], hints["warmup_steps"])
    assert (settings["warmup_init_lr"], settings["max_norm"]) == (hints["warmup_init_lr"], 1.5)
    assert settings["epochs"] <= 3


def test_c13_the_alignment_check_and_samples_of_text(clean: Any) -> None:
    result, said, _ = clean
    assert said[0] == "targets[0] should equal inputs[1] -> OK"
    assert [key for key in result.facts if key.startswith("sample")] == [f"sample {p!r}" for p in charlm.PROMPTS]
    assert result.facts["sample 'she was'"].startswith("she was")
    assert len(result.facts["sample 'she was'"]) == len("she was") + 60


def test_c10_shuffled_targets_are_diagnosed_as_misaligned_with_chronic_clipping() -> None:
    result, said = go("shuffled-targets", metrics_file="", **{**SMALL, "steps": 110})
    assert said[0] == "targets[0] should equal inputs[1] -> MISMATCH!"
    assert result.facts["clipped_last"] == 1.0
    assert result.facts["diagnosis"].startswith("misaligned: ")
    assert "chronic clipping: 100%" in result.facts["diagnosis"]
    assert "chronic-clipping" in result.findings


def test_c15_chronic_clipping_of_aligned_data_is_not_called_misaligned() -> None:
    result, _ = go("loss-x1000", metrics_file="", **{**SMALL, "steps": 110})
    assert result.facts["diagnosis"].startswith("chronic clipping: 100%")
    assert "chronic-clipping" in result.findings


def test_c1_sgd_with_a_rate_of_one_dies_unguarded_and_trains_guarded() -> None:
    bare, _ = go("sgd-lr-1", guarded=False, metrics_file="", steps=100)
    assert not bare.weights_finite
    assert math.isnan(bare.score)
    assert bare.facts["sample 'she was'"] == "she was", "a model of NaN has nothing to say"
    held, _ = go("sgd-lr-1", metrics_file="", steps=100)
    assert held.weights_finite
    assert held.score < 3.0


def test_c7_any_text_by_characters_or_words(tmp_path: Path) -> None:
    path = tmp_path / "forest.txt"
    path.write_text("the forest was dark and she was alone in the forest. " * 200, encoding="utf-8")
    for how in ({"tokenizer": "byte"}, {"tokenizer": "char"}, {"word_tokenizer": True}):
        result, _ = go(data=str(path), metrics_file="", **how, **SMALL)
        assert result.num_steps == 60
        assert result.metrics["train_loss"] < math.log(256 if how.get("tokenizer") == "byte" else 30)
    with pytest.raises(InputError, match=r"nothing\.txt cannot be read"):
        go(data=str(tmp_path / "nothing.txt"), metrics_file="")
    path.write_text("short")
    with pytest.raises(InputError, match="too few for one batch"):
        go(data=str(path), metrics_file="")


def test_c7_wandb_is_offline_without_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Run:
        def log(self, values: dict[str, Any], step: int) -> None:
            calls.append((step, *values))

        def finish(self) -> None:
            calls.append("finish")

    def init(**how: Any) -> Run:
        calls.append({name: how[name] for name in ("project", "name", "mode")})
        return Run()

    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    go(wandb=True, wandb_project="forest", wandb_run="one", metrics_file="m.jsonl", **{**SMALL, "steps": 11})
    assert calls[0] == {"project": "forest", "name": "one", "mode": "offline"}
    assert (0, "train/loss", "train/learning_rate", "train/epoch") in calls
    assert calls[-1] == "finish"


def test_c7_without_wandb_the_file_has_the_metrics_and_one_notice_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        go(wandb=True, metrics_file="", **{**SMALL, "steps": 11})
    lines = [json.loads(line) for line in (tmp_path / "training_metrics.jsonl").read_text().splitlines()]
    assert any("train/loss" in line.get("metrics", {}) for line in lines)
    said = [record.message for record in caplog.records if "wandb" in record.message]
    assert said == [
        "wandb is not installed (pip install 'trimtab[wandb]'): the metrics go to training_metrics.jsonl alone"
    ]


def test_the_target_for_the_doctor() -> None:
    target = doctor_target(RECIPE, {"metrics_file": ""}, quick=True)
    batch = next(iter(target["loader"]))
    assert target["loss_fn"](target["model"](batch[0]), batch[1]).item() > 3.0
    rows = build_parts(RECIPE, settings_of(RECIPE, {"metrics_file": ""})).train_loader.dataset
    assert charlm.aligned(*(one[None] for one in rows[4]))


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_default_run_gives_readable_words() -> None:
    """Most words in its samples of text are words of the text it learned from."""
    known = set(re.findall(r"[a-z]{2,}", reference().lower()))
    result = run_recipe(RECIPE, {"metrics_file": "", "sample_length": 300}, run_dir=False)
    text = " ".join(str(value) for name, value in result.facts.items() if name.startswith("sample"))
    said = re.findall(r"[a-z]{2,}", text.lower())
    assert len(said) > 60
    assert sum(word in known for word in said) / len(said) >= 0.6
