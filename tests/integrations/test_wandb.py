"""A real run of Weights & Biases, offline: written by a recipe, and read back from its file."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.loggers.kit import WandbFile
from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe

needed = "wandb" in os.environ.get("TRIMTAB_REQUIRE", "")


@pytest.mark.skipif(find_spec("wandb") is None and not needed, reason="needs wandb")
@pytest.mark.filterwarnings("ignore")  # wandb's own imports warn
def test_c7_metrics_and_samples_reach_a_run_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"WANDB_DIR": tmp_path, "WANDB_SILENT": "true", "WANDB_DATA_DIR": tmp_path}.items():
        monkeypatch.setenv(name, str(value))
    small = {"steps": 31, "d_model": 32, "layers": 1, "d_ff": 64, "seq": 16, "sample_length": 8, "warmup_steps": 5}
    given = {"wandb": True, "wandb_project": "forest", "metrics_file": "", **small}
    result = run_recipe(load_recipe("charlm"), given, quick=True, run_dir=False)
    file = WandbFile(tmp_path)
    assert file.others["run"][0].project == "forest"
    rows = file.rows
    losses = {row["_step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert list(losses) == [0, 10, 20, 30]
    assert losses[0] > losses[30] > 0
    found = {name: value for row in rows for name, value in row.items()}
    assert found["samples/she was"] == result.facts["sample 'she was'"]
    assert {"train/learning_rate", "train/epoch", "train/epoch_avg_loss", "train/total_time_seconds"} <= set(found)
