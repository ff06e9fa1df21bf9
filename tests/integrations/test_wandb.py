"""A real run of Weights & Biases, offline: written by a recipe, and read back from its file."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trimtab.train.recipe import run_recipe
from trimtab.train.recipes import load_recipe

needed = "wandb" in os.environ.get("TRIMTAB_REQUIRE", "")
BLOCK, HEAD = 32768, 7


def records(raw: bytes) -> Iterator[bytes]:
    """The records of a `.wandb` file: parts of up to a block, each with checksum, size, and whether it is the last."""
    at, part = HEAD, b""
    while at + HEAD <= len(raw):
        left = BLOCK - at % BLOCK
        _, size, kind = struct.unpack("<IHB", raw[at : at + HEAD]) if left >= HEAD else (0, 0, 0)
        if kind == 0:  # the rest of a block is empty
            at += left
            continue
        part += raw[at + HEAD : at + HEAD + size]
        at += HEAD + size
        if kind in (1, 4):
            yield part
            part = b""


def history(folder: Path) -> tuple[str, list[dict[str, Any]]]:
    """The project, and one row for each step."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.rglob("*.wandb")
    project, rows = "", []
    for raw in records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(raw)
        if record.WhichOneof("record_type") == "run":
            project = record.run.project
        if record.WhichOneof("record_type") == "history":
            named = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            rows.append({name: json.loads(value) for name, value in named.items()})
    return project, rows


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
    project, rows = history(tmp_path)
    assert project == "forest"
    losses = {row["_step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert list(losses) == [0, 10, 20, 30]
    assert losses[0] > losses[30] > 0
    found = {name: value for row in rows for name, value in row.items()}
    assert found["samples/she was"] == result.facts["sample 'she was'"]
    assert {"train/learning_rate", "train/epoch", "train/epoch_avg_loss", "train/total_time_seconds"} <= set(found)
