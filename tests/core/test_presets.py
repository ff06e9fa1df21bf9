"""Every number of a preset beside the feature it comes from, and how presets combine with other settings."""

from __future__ import annotations

import inspect
import json
import math
from pathlib import Path

import pytest

from trimtab import Config, ConfigError
from trimtab.compat.lines import CADENCE, LIMITS
from trimtab.core.clipping import Agc
from trimtab.core.config import resolve
from trimtab.core.policy import LADDERS
from trimtab.core.presets import PRESETS, get_preset, warmup_lr
from trimtab.core.registry import all_rules


def config(name: str) -> Config:
    return Config.from_dict({"preset": name})


class TestDocument000:
    preset = get_preset("6dim-clip")

    def test_a11_every_hundredth_step_with_both_warnings(self) -> None:
        assert dict(self.preset.lines) == {"a11": 100}
        assert dict(self.preset.limits) == dict(LIMITS["a11"]) == {"exploding": 100.0, "vanishing": 1e-7}

    def test_a12_bands(self) -> None:
        bands = {(b.of, b.low, b.high): b.meaning for b in self.preset.bands}
        assert bands["global norm", 0.1, 10.0] == "healthy"
        assert ("largest norm of a parameter", 100.0, math.inf) in bands
        assert ("smallest norm of a parameter", 0.0, 1e-7) in bands

    def test_a13_clipped_to_one_only_above_ten(self) -> None:
        clip = config("6dim-clip").clip
        assert (clip.norm, clip.above) == (1.0, 10.0)

    def test_a28_a35_hints(self) -> None:
        hints = self.preset.hints
        assert (hints["base_lr"], hints["warmup_steps"], hints["eps"]) == (1e-4, 500, 1e-8)
        assert (hints["logit_scale"], hints["min_batch_size"], hints["loss_version"]) == ((14.0, 100.0), 8, 1)

    def test_a38_the_thresholds_that_contradict_each_other_are_told_apart(self) -> None:
        text = " ".join(self.preset.notes)
        assert "above 10" in text
        assert "above 100" in text
        assert "[B, B]" in text


class TestDocument001:
    preset = get_preset("camoxpert")

    def test_b5_warns_above_five_times_the_clip(self) -> None:
        assert self.preset.limits["high"] == LIMITS["b5"]["high"] == 5.0
        assert self.preset.bands[-1].low == 5.0 * 0.5

    def test_b8_b9_lines_once_per_epoch_and_at_once(self) -> None:
        assert dict(self.preset.lines) == {"b5": 1, "b8": 0, "b9": 1}

    def test_b10_clip_of_a_half_and_less_if_unstable(self) -> None:
        assert config("camoxpert").clip.norm == 0.5
        assert self.preset.hints["unstable_clip"] == 0.3

    def test_b11_rates_of_the_second_stage(self) -> None:
        lr, stage2 = self.preset.hints["base_lr"], self.preset.hints["stage2"]
        assert lr == 0.00025
        assert stage2["lr_factor"] == 0.5
        assert lr * stage2["head_lr_factor"] == pytest.approx(0.000125)
        assert lr * stage2["backbone_lr_factor"] == pytest.approx(0.0000125)

    def test_b12_scaler_of_the_second_stage_is_what_a_grad_scaler_takes(self) -> None:
        scaler = self.preset.hints["scaler"]
        assert scaler == {"init_scale": 1024.0, "growth_factor": 1.5, "backoff_factor": 0.5, "growth_interval": 1000}
        import torch

        built = torch.amp.GradScaler("cpu", **scaler)
        assert built.get_backoff_factor() == 0.5
        assert set(scaler) <= set(inspect.signature(torch.amp.GradScaler).parameters)

    def test_b13_schedule(self) -> None:
        hints = self.preset.hints
        assert (hints["schedule"], hints["pct_start"]) == ("onecycle", 0.1)
        assert (hints["stage1_epochs"], hints["stage2_epochs"]) == (30, 110)

    def test_b14_b17_b22_accumulation_checkpoints_and_defaults(self) -> None:
        hints = self.preset.hints
        assert (hints["accumulation_steps"], hints["keep_last"], hints["batch_size"]) == (4, 3, 2)
        assert hints["weight_decay"] == 0.0001

    def test_b31_the_contradictions_are_named(self) -> None:
        text = " ".join(self.preset.notes)
        for word in ("0.5", "2000", "0.000125", "140", "120", "GRAD007", "ValueError"):
            assert word in text


class TestDocument002:
    preset = get_preset("mlp-cuda")

    def test_c3_clip(self) -> None:
        assert config("mlp-cuda").clip.norm == 1.5

    def test_c4_every_tenth_step_with_weights_measured_then(self) -> None:
        assert dict(self.preset.lines) == {"c4": 10}
        assert config("mlp-cuda").full_every == 10

    def test_c5_base_rate(self) -> None:
        assert self.preset.hints["base_lr"] == 5e-5

    def test_c6_warm_up(self) -> None:
        hints = self.preset.hints
        assert (hints["warmup_steps"], hints["warmup_init_lr"]) == (200, 1e-6)
        for step in (0, 10, 50, 199):
            assert warmup_lr(hints, step) == pytest.approx(1e-6 + (step / 200) * (5e-5 - 1e-6), rel=1e-12)
        assert warmup_lr(hints, 200) == warmup_lr(hints, 10_000) == 5e-5
        assert warmup_lr({"base_lr": 0.1}, 0) == 0.1

    def test_c8_bands(self) -> None:
        for name in ("mlp-cuda", "mlp-cuda-v1"):
            bands = {(b.low, b.high): b.meaning for b in get_preset(name).bands}
            assert bands[0.1, 1.0] == "healthy"
            assert "vanishing" in bands[0.0, 0.1]
            assert "lower the learning rate" in bands[10.0, math.inf]
            clip = config(name).clip.norm
            assert any(b.low == clip and "is clipped" in b.meaning for b in get_preset(name).bands)

    def test_c14_the_first_version_is_a_preset_of_its_own(self) -> None:
        first = get_preset("mlp-cuda-v1")
        assert config("mlp-cuda-v1").clip.norm == 1.0
        hints = first.hints
        assert (hints["base_lr"], hints["warmup_steps"], hints["warmup_init_lr"]) == (1e-4, 100, 1e-6)
        assert "mlp-cuda-v1" in " ".join(self.preset.notes)


class TestDocument003:
    preset = get_preset("seo")

    def test_d1_defaults(self) -> None:
        assert config("seo").clip.norm == 1.0
        hints = self.preset.hints
        assert (hints["base_lr"], hints["weight_decay"], hints["patience"]) == (1e-3, 1e-4, 10)
        assert (hints["use_amp"], hints["min_delta"], hints["schedule"], hints["num_epochs"]) == (
            True,
            1e-4,
            "cosine",
            100,
        )

    def test_d2_d12_both_norms_every_step(self) -> None:
        assert dict(self.preset.lines) == {"d2": 1}
        assert self.preset.hints["log_every"] == 1

    def test_d7_corrective_factors_are_those_of_the_policy(self) -> None:
        assert config("seo").mode == "act"
        factors = self.preset.hints["corrective"]
        assert factors == {
            "train_loss_nan_inf": {"lr": 0.5},
            "val_loss_nan_inf": {"lr": 0.5},
            "loss_explosion": {"lr": 0.1},
            "overfitting": {"weight_decay": 1.5},
        }
        assert self.preset.hints["loss_explosion_ratio"] == 10.0

        def first(name: str) -> list[float]:
            return [a.args["factor"] for a in LADDERS[name][0][1] if a.args]

        assert first("nonfinite-loss") == [factors["train_loss_nan_inf"]["lr"]]
        assert first("diverging-loss") == first("loss-spike") == [factors["loss_explosion"]["lr"]]
        assert first("overfitting") == [factors["overfitting"]["weight_decay"]]

    def test_d19_the_contradictions_are_named(self) -> None:
        text = " ".join(self.preset.notes)
        for word in ("zeros", "before and after", "unscaling", "OneCycleLR", "validation"):
            assert word in text


class TestDocument004:
    preset = get_preset("lmol")

    def test_e7_clip(self) -> None:
        assert config("lmol").clip.norm == 1.0

    def test_e13_every_tenth_step(self) -> None:
        assert dict(self.preset.lines) == {"e13": 10}
        assert LIMITS["e13"] == {"exploding": 100.0, "vanishing": 1e-8, "zero": 1e-8, "zero_share": 0.5}

    def test_e15_thresholds_and_patience(self) -> None:
        assert (self.preset.limits["exploding"], self.preset.limits["vanishing"]) == (300.0, 1e-12)
        hints = self.preset.hints
        assert (hints["patience"], hints["min_delta"], hints["min_reasonable_loss"]) == (5, 1e-4, 1e-8)
        assert hints["class_accuracy_gap"] == 0.3

    def test_e9_e22_hints(self) -> None:
        hints = self.preset.hints
        assert (hints["base_lr"], hints["projector_lr"], hints["weight_decay"]) == (2e-4, 2e-5, 0.1)
        assert (hints["warmup_frac"], hints["min_lr_frac"], hints["schedule"]) == (0.05, 0.01, "cosine")
        assert (hints["amp_dtype"], hints["log_every"], hints["gpu_log_every"]) == ("bf16", 10, 100)

    def test_e23_the_contradictions_are_named(self) -> None:
        text = " ".join(self.preset.notes)
        assert "0.0, none, on the command line" in text
        assert "--detect_anomaly false" in text


def test_table_f_the_clip_of_each_document() -> None:
    clips = {name: config(name).clip.norm for name in ("000", "001", "002", "003", "004")}
    assert clips == {"000": 1.0, "001": 0.5, "002": 1.5, "003": 1.0, "004": 1.0}
    by_letter = {letter: config(letter).preset for letter in "abcde"}
    assert list(by_letter.values()) == ["6dim-clip", "camoxpert", "mlp-cuda", "seo", "lmol"]


def test_d18_architectures_name_a_public_source() -> None:
    clips = {p.name.removeprefix("arch-"): config(p.name).clip for p in PRESETS if p.name.startswith("arch-")}
    assert {name: clip.norm for name, clip in clips.items() if clip.norm} == {
        "gpt": 1.0,
        "bert": 1.0,
        "transformer-xl": 0.25,
        "lstm": 0.25,
        "vit": 1.0,
        "swin": 5.0,
        "detr": 0.1,
        "diffusion": 1.0,
        "tacotron2": 1.0,
        "ppo": 0.5,
        "dqn": 10.0,
    }
    assert clips["nfnet"].adaptive == Agc(ratio=0.01, eps=1e-3)
    assert not clips["resnet"]
    assert all("github.com/" in p.source for p in PRESETS if p.name.startswith("arch-"))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.name)
def test_every_preset_is_complete_and_plain_data(preset) -> None:
    made = Config.from_dict({"preset": preset.name})
    assert made.preset == preset.name
    assert Config.from_dict(made.to_dict()) == made
    assert preset.title
    assert preset.source
    assert set(preset.lines) <= set(CADENCE)
    json.dumps(preset.hints)
    codes = {rule.code for rule in all_rules()} | {rule.name for rule in all_rules()}
    for note in preset.notes:
        for word in note.replace("(", " ").replace(")", " ").split():
            if word[:4] in ("GRAD", "LOSS") and word[4:7].isdigit():
                assert word[:7] in codes


def test_names_and_aliases_are_unique() -> None:
    names = [n for p in PRESETS for n in (p.name, *p.aliases)]
    assert len(names) == len(set(names))


def test_an_unknown_preset_is_an_error_with_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="did you mean 'camoxpert'"):
        get_preset("camoexpert")
    with pytest.raises(ConfigError, match="known are 6dim-clip, camoxpert"):
        get_preset("???")
    with pytest.raises(ConfigError, match="expected the name of a preset"):
        Config.from_dict({"preset": 3})
    assert get_preset(" MLP_cuda ").name == "mlp-cuda"


class TestOrder:
    def test_keywords_over_config_over_preset_over_defaults(self) -> None:
        made = resolve({"clip": 0.3, "full_every": 50}, preset="mlp-cuda", clip=0.1)
        assert (made.clip.norm, made.full_every, made.mode, made.preset) == (0.1, 50, "advise", "mlp-cuda")
        assert resolve({"clip": 0.3}, preset="mlp-cuda").clip.norm == 0.3
        assert resolve({}, preset="mlp-cuda").full_every == 10
        assert resolve({"mode": "advise"}, preset="seo").mode == "advise"

    def test_the_environment_and_a_found_file_lie_over_the_preset(self, monkeypatch: pytest.MonkeyPatch) -> None:
        Path("trimtab.toml").write_text('preset = "seo"\nclip = 2.0\n')
        made = resolve(None)
        assert (made.preset, made.clip.norm, made.mode) == ("seo", 2.0, "act")
        monkeypatch.setenv("TRIMTAB_MODE", "observe")
        assert resolve(None).mode == "observe"
        assert resolve(None, preset="camoxpert").clip.norm == 2.0
        monkeypatch.setenv("TRIMTAB_PRESET", "lmol")
        assert resolve(None).preset == "lmol"

    def test_in_toml_and_by_path(self) -> None:
        Path("mine.toml").write_text('[tool.trimtab]\npreset = "002"\n')
        assert resolve("mine.toml").preset == Config.from_toml("mine.toml").preset == "mlp-cuda"

    def test_of_a_config_object_what_differs_counts_as_given(self) -> None:
        made = resolve(Config.from_dict({"mode": "observe"}), preset="seo")
        assert (made.mode, made.clip.norm) == ("observe", 1.0)
        other = resolve(Config.from_dict({"preset": "mlp-cuda", "mode": "act"}), preset="camoxpert")
        assert (other.clip.norm, other.full_every, other.mode) == (0.5, 50, "act")
        same = Config.from_dict({"preset": "seo"})
        assert resolve(same) == same

    def test_tables_are_merged_entry_by_entry(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from dataclasses import replace

        from trimtab.core import presets

        mine = replace(get_preset("seo"), name="mine", aliases=(), settings={"rules": {"loss-spike": {"z": 9.0}}})
        monkeypatch.setattr(presets, "PRESETS", (mine,))
        made = Config.from_dict({"preset": "mine", "rules": {"overfitting": {"persist": 4}}})
        assert made.rules == {"loss-spike": {"z": 9.0}, "overfitting": {"persist": 4}}
