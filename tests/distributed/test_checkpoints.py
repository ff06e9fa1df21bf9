"""Processes that hold parts of the parameters save one checkpoint, and resume from it exactly; others than they can."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import Told, torchrun
from tests.distributed.saving import Net
from trimtab import Checkpointer
from trimtab.checkpoint import shards
from trimtab.checkpoint.format import container
from trimtab.core.errors import CheckpointError

pytestmark = pytest.mark.long


def run(folder: Path, size: int, jobs: dict[str, tuple[str, dict[str, Any]]]) -> Told:
    done = torchrun(size, "-m", "tests.distributed.saving", str(folder), json.dumps(jobs))
    assert done.returncode == 0, done.stderr
    return {name: [json.loads((folder / f"{name}-{r}.json").read_text()) for r in range(size)] for name in jobs}


EXACT = ("weights", "moments", "buffers", "rng")


def ends(told: list[dict[str, Any]], names: tuple[str, ...] = EXACT) -> list[list[str]]:
    return [[one[name] for name in names] for one in told]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two(home: Path) -> Told:
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "whole": ("whole", {}),
        "first": ("parts", {"steps": 13}),
        "second": ("parts", {}),
        "ddp": ("ddp", {"way": "ddp", "steps": 13}),
        "ddp, resumed": ("ddp", {"way": "ddp"}),
        "later": ("async", {"steps": 9, "asynchronous": True}),
        "rest": ("async", {"asynchronous": True}),
        "bad": ("bad", {"kind": "by_hand", "bad": 1}),
        "tp": ("tp", {"kind": "by_hand", "way": "tp"}),
        "tp, resumed": ("tp", {"kind": "by_hand", "way": "tp", "load": True}),
        "one full disk": ("full", {"kind": "by_hand", "full": 1}),
    }
    return run(home, 2, jobs)


@pytest.fixture(scope="module")
def four(home: Path) -> Told:
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "four": ("reshard", {"steps": 4, "every": 3, "dropout": 0.0}),
        "hsdp": ("hsdp", {"kind": "by_hand", "way": "hsdp"}),
        "hsdp, resumed": ("hsdp", {"kind": "by_hand", "way": "hsdp", "load": True}),
    }
    return run(home, 4, jobs)


@pytest.mark.parametrize("rest", ["second", "rest", "ddp, resumed"])
def test_a_resumed_run_ends_as_one_that_was_never_interrupted(two: Told, rest: str) -> None:
    assert ends(two[rest]) == ends(two["whole"])
    for resumed, whole in zip(two[rest], two["whole"], strict=True):
        assert resumed["from"] == resumed["start"] > 0
        assert resumed["seen"] == whole["seen"][resumed["start"] :]  # this rank's own batches


def test_every_rank_sees_the_same_checkpoints_certified_by_quiet_steps(two: Told) -> None:
    for one in two["first"]:
        assert [entry[:2] for entry in one["listed"]] == [[5, "good"], [10, "candidate"]]
        assert set(one["listed"][0][2]) >= {"model", "optimizer", "scheduler", "loader", "guard", "rng"}


@pytest.mark.parametrize("way", ["tp", "hsdp"])
def test_so_does_a_loop_without_a_guard(two: Told, four: Told, way: str) -> None:
    told = two if way == "tp" else four
    assert ends(told[f"{way}, resumed"]) == ends(told[way])
    assert [one["extra"]["rank"] for one in told[f"{way}, resumed"]] == list(range(len(told[way])))


def test_a_nan_in_the_part_of_one_rank_condemns_the_checkpoint_of_all(two: Told, home: Path) -> None:
    for one in two["bad"]:
        assert one["state"] == "bad"
        assert Path(one["path"]).parent == home / "bad" / "quarantine"
    assert Checkpointer(home / "bad").list() == []


def test_a_rank_that_cannot_write_costs_the_checkpoint_on_all_and_leaves_nothing(two: Told, home: Path) -> None:
    for one in two["one full disk"]:
        assert one["state"] == "failed"
        assert "rank 1" in one["path"]
        assert "No space left" in one["path"]
    assert [name for name in os.listdir(home / "full") if name != ".writer"] == []


@pytest.mark.parametrize("size", [2, 1])
def test_fewer_ranks_go_on_with_the_same_state_and_the_rest_of_the_data(four: Told, home: Path, size: int) -> None:
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "fewer": ("reshard", {"steps": 3 + 4 // size, "every": 100, "dropout": 0.0})
    }
    told = run(home, size, jobs)["fewer"]
    assert {one["from"] for one in told} == {3}
    seen = [sample for one in four["four"] for batch in one["seen"][:3] for sample in batch]
    rest = [sample for one in told for batch in one["seen"] for sample in batch]
    assert len(seen) == 48
    assert not set(seen) & set(rest)  # nothing twice in an epoch
    following = {sample for one in four["four"] for sample in one["seen"][3]}
    assert following <= set(rest)  # the batches that come next, cut otherwise


def test_one_process_reads_the_whole_model_and_a_sharded_one_reads_that_of_one_process(four: Told, home: Path) -> None:
    model = Net(0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    extra = {"rank": -1}
    snapshot = Checkpointer(home / "hsdp").resume(model=model, optimizer=optimizer, extra=extra)
    assert snapshot is not None
    assert (snapshot.step, extra["rank"]) == (3, 0)
    assert all(state["step"] == 3 and state["exp_avg"].shape == p.shape for p, state in optimizer.state.items())
    plain = home / "plain"
    Checkpointer(plain).save(3, model=model, optimizer=optimizer, extra=extra)
    jobs: dict[str, tuple[str, dict[str, Any]]] = {
        "sharded": ("plain", {"kind": "by_hand", "load": True, "steps": 0}),
        "same": ("hsdp", {"kind": "by_hand", "load": True, "steps": 0}),
    }
    told = run(home, 2, jobs)
    assert ends(told["sharded"], ("weights", "moments")) == ends(told["same"], ("weights", "moments"))


def command(*args: str) -> tuple[int, str]:
    start = [sys.executable, "-m", "trimtab", "checkpoint", *args]
    done = subprocess.run(start, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout


def test_the_commands_understand_it(two: Told, home: Path) -> None:
    _, listed = command("list", str(home / "whole"), "--json")
    assert [one["step"] for one in json.loads(listed)["checkpoints"]] == [5, 10, 15]
    _, shown = command("show", str(home / "whole"), "--all")
    assert {"up.weight", "exp_avg.out.bias"} <= set(shown.split())
    assert "12 x 5" in shown
    assert command("verify", str(home / "whole"))[0] == 0
    status, differs = command("diff", str(home / "whole" / "5"), str(home / "whole" / "10"))
    assert status == 1
    assert "up.weight" in differs


@pytest.mark.parametrize("file", ["rank-1/shards.safetensors", "rank-0/rng.safetensors", "rank-1/manifest.json"])
def test_damage_in_the_files_of_any_rank_is_named_and_the_one_before_is_used(
    four: Told, home: Path, tmp_path: Path, file: str
) -> None:
    shutil.copytree(home / "hsdp", tmp_path / "saved")
    (path,) = [one.path for one in Checkpointer(tmp_path / "saved").list()]
    data = bytearray((path / file).read_bytes())
    data[-3] ^= 1
    (path / file).write_bytes(data)
    found = Checkpointer(tmp_path / "saved").verify(3)
    assert [one.file.split("/")[0] for one in found.damage] == [file.split("/")[0]]
    model = Net()
    assert Checkpointer(tmp_path / "saved").resume(model=model) is None


def test_nothing_in_it_is_a_pickle_and_a_plan_that_lies_is_refused(
    two: Told, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home / "whole" / "step-00000005"
    assert {one.suffix for one in path.rglob("*") if one.is_file()} == {".json", ".safetensors", ""}
    monkeypatch.setattr(pickle, "load", None)
    monkeypatch.setattr(pickle, "loads", None)
    monkeypatch.setattr(torch, "load", None)
    whole = shards.read(path).sections["model"]
    assert whole["up.weight"].shape == (12, 5)
    found = container.inspect(path)
    honest = container.read(path, sections=(shards.SHARDS,)).sections[shards.SHARDS]["model.up.weight"]
    dtype, shape, parts = honest
    for lie in (
        [dtype, [10**9, 5], parts],
        [dtype, shape, parts[:1]],
        [dtype, shape, [[[0, 0], [24, 5], 0]]],
        [dtype, shape, [[*part[:2], 7] for part in parts]],
        [dtype, shape, [[[-1, 0], *part[1:]] for part in parts]],
        ["object", shape, parts],
    ):
        monkeypatch.setattr(container, "read", lambda *_, lie=lie, **__: _Contents({"model.up.weight": lie}))
        with pytest.raises(CheckpointError, match="makes no sense"):
            shards.plan_of(path, found)


class _Contents:
    def __init__(self, plan: dict[str, Any]) -> None:
        self.sections = {shards.SHARDS: plan}
