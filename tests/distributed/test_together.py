"""Several processes train one model: each sees what a single one would, and all of them do the same."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.launch import Jobs, Told, told_by, torchrun
from tests.distributed.soak import soak
from trimtab.record.reader import ranks_in, read_run
from trimtab.report.summary import OtherRank, summarise

pytestmark = pytest.mark.long
BAD, SAMPLE = [7, 1], 1
JOBS: Jobs = {
    "alone": ("alone", {}),
    "alone, even": ("alone, even", {}),
    "alone, clipped": ("alone", {"clip": 0.2}),
    **{way: (way, {}) for way in ("ddp", "fsdp", "tp")},
    **{f"{way}, no guard": (way, {"guards": []}) for way in ("ddp", "fsdp")},
    **{f"{way}, clipped": (way, {"clip": 0.2}) for way in ("ddp", "fsdp")},
    **{f"{way}, clipped by PyTorch": (way, {"plain_clip": 0.2, "guards": []}) for way in ("ddp", "fsdp")},
    **{f"{way}, bad": (way, {"bad": [BAD]}) for way in ("ddp", "fsdp")},
    "fsdp, bad, act": ("fsdp", {"bad": [BAD], "mode": "act"}),
    "fsdp, bad, SGD": ("fsdp", {"bad": [BAD], "optimizer": "SGD"}),
    **{f"{way}, bad, away": (way, {"bad": [BAD], "fused": True, "away": True}) for way in ("ddp", "fsdp")},
}


STAGES: Jobs = {
    "stages": ("stages", {"clip": 0.2}),
    "stages, bad": ("stages", {"bad": [[7, 0]]}),
}
APART: Jobs = {
    **STAGES,
    "moved": ("ddp", {"moved": [15, 1]}),
    **{f"{way}, same data": (way, {"same_data": True}) for way in ("ddp", "fsdp")},
    **{f"{way}, positions": (way, {"positions": True}) for way in ("ddp", "fsdp")},
    **{f"{way}, own failure": (way, {"fails": [5, 1], "bad": [BAD], "clip": 0.2}) for way in ("ddp", "fsdp")},
    **{f"{way}, odd": (way, {"odd": 1, "steps": 45}) for way in ("ddp", "fsdp")},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by(tmp_path_factory.mktemp("two"), 2, {**JOBS, **APART})


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return told_by(tmp_path_factory.mktemp("four"), 4, {**JOBS, "hsdp": ("hsdp", {})})


PAIRS = [("ddp", "alone"), ("fsdp", "alone"), ("tp", "alone, even"), ("fsdp, clipped", "alone, clipped")]
SHARED = ("loss", "grad_norm", "weight_norm", "clip_coef", "lr/0")


def check_as_alone(told: Told, way: str, single: str) -> None:
    """Every process has on record what one alone would have."""
    (want, *_) = told[single]
    for mine in told[way]:
        assert mine["findings"] == want["findings"] == []
        assert mine["names"] == want["names"]
        for step, (table, known) in enumerate(zip(mine["tables"], want["tables"], strict=True)):
            np.testing.assert_allclose(table, known, rtol=1e-5, atol=1e-6, err_msg=f"step {step}")
        for scalars, known in zip(mine["scalars"], want["scalars"], strict=True):
            for name in set(SHARED) & (set(scalars) | set(known)):
                assert scalars[name] == pytest.approx(known[name], rel=1e-5, abs=1e-7), name


@pytest.mark.parametrize(("way", "single"), PAIRS)
def test_two_processes_see_what_one_alone_would(two: Told, way: str, single: str) -> None:
    check_as_alone(two, way, single)


@pytest.mark.parametrize(("way", "single"), [*PAIRS, ("hsdp", "alone")])
def test_so_do_four(four: Told, way: str, single: str) -> None:
    check_as_alone(four, way, single)


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_guard_changes_no_bit(two: Told, four: Told, way: str) -> None:
    for told in (two, four):
        for guarded, plain in zip(told[way], told[f"{way}, no guard"], strict=True):
            assert guarded["weights"] == plain["weights"]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_clipping_is_that_of_pytorch(two: Told, four: Told, way: str) -> None:
    for told in (two, four):
        for mine, theirs in zip(told[f"{way}, clipped"], told[f"{way}, clipped by PyTorch"], strict=True):
            assert any(scalars["clip_coef"] < 1 for scalars in mine["scalars"])
            for name, weights in mine["weights"].items():
                np.testing.assert_allclose(weights, theirs["weights"][name], rtol=1e-6, atol=1e-7)
            norms = [scalars["grad_norm"] for scalars in mine["scalars"]]
            np.testing.assert_allclose(norms, theirs["norms"], rtol=1e-6)


@pytest.mark.parametrize("job", ["ddp, bad", "fsdp, bad", "fsdp, bad, act", "fsdp, bad, SGD"])
def test_a_bad_batch_of_one_process_is_rejected_by_all_and_its_rank_named(two: Told, four: Told, job: str) -> None:
    step, rank = BAD
    for told in (two, four):
        first = told[job][0]
        for mine in told[job]:
            assert mine["rejected"] == 1
            assert mine["counts"] == first["counts"]
            assert mine["weights"] == first["weights"]
            assert all(
                math.isfinite(w)
                for row in mine["weights"]["out.weight" if "fsdp" in job else "module.out.weight"]
                for w in row
            )
            assert [f[:2] for f in mine["findings"]] == [f[:2] for f in first["findings"]]
            names = {name: (at, message, subject) for at, name, message, subject in mine["findings"]}
            assert set(names) == {"nonfinite-input", "nonfinite-loss", "nonfinite-gradient"}
            for name in ("nonfinite-input", "nonfinite-loss"):
                at, message, subject = names[name]
                assert at == step
                assert f"on rank {rank}" in message
                assert f"rank {rank}" in subject
            assert f"sample {SAMPLE}" in names["nonfinite-input"][2]  # in the record of every process


APART_BY = {
    "moved": ("replicas-diverged", {"rank 1"}, {20}),
    "ddp, same data": ("duplicated-data", {"rank 0", "rank 1"}, {8}),
    "fsdp, same data": ("duplicated-data", {"rank 0", "rank 1"}, {8}),
    "ddp, odd": ("rank-out-of-family", {"rank 1"}, {40}),
    "fsdp, odd": ("rank-out-of-family", {"rank 1"}, {40}),
}


@pytest.mark.parametrize("job", APART_BY)
def test_what_sets_one_process_apart_is_found_by_all(two: Told, job: str) -> None:
    want, ranks, steps = APART_BY[job]
    for mine in two[job]:
        found = [(at, name, set(subject)) for at, name, _, subject in mine["findings"] if name == want]
        assert [(at, named) for at, _, named in found] == [(at, ranks) for at in steps]


def test_pipeline_stages_are_clipped_by_the_norm_of_all_of_them(two: Told) -> None:
    (want, *_) = two["alone, clipped"]
    norms = [scalars["grad_norm"] for scalars in want["scalars"]]
    for mine in two["stages"]:
        assert mine["findings"] == []
        np.testing.assert_allclose(mine["norms"], norms, rtol=1e-5)
        for name, weights in mine["weights"].items():
            np.testing.assert_allclose(weights, want["weights"][name], rtol=1e-5, atol=1e-6)


def test_a_step_that_one_stage_must_reject_is_rejected_by_all(two: Told) -> None:
    first, second = two["stages, bad"]
    assert first["rejected"] == second["rejected"] == 1
    assert first["counts"] == second["counts"] == [29.0]
    assert {at for at, *_ in first["findings"] + second["findings"]} == {7}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_an_input_that_is_the_same_on_purpose_is_no_duplicated_data(two: Told, way: str) -> None:
    assert [mine["findings"] for mine in two[f"{way}, positions"]] == [[], []]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_guard_that_fails_in_one_process_keeps_nobody_waiting(two: Told, way: str) -> None:
    first, second = two[f"{way}, own failure"]
    assert first["weights"] == second["weights"]
    assert first["rejected"] == second["rejected"] == 1  # it still takes part in what all decide
    assert first["unseen"] == second["unseen"] == [["rank 1"]]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_the_same_where_weights_are_on_a_device(two: Told, four: Told, way: str) -> None:
    for told in (two, four):
        first = told[f"{way}, bad, away"][0]
        for mine in told[f"{way}, bad, away"]:
            assert mine["rejected"] == 1
            assert mine["counts"] == first["counts"]
            assert mine["weights"] == first["weights"]
            assert all(math.isfinite(w) for rows in mine["weights"].values() for w in np.ravel(rows))
            assert {"nonfinite-loss", "nonfinite-gradient"} <= {name for _, name, _, _ in mine["findings"]}
            assert {at for at, _, _, _ in mine["findings"]} == {BAD[0]}


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
def test_a_guard_in_one_process_alone_says_so_and_does_nothing_alone(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_TEST_WAIT_S", "1")
    told = told_by(tmp_path, 2, {"one": (way, {"guards": [0]}), "none": (way, {"guards": []})})
    assert [one["weights"] for one in told["one"]] == [one["weights"] for one in told["none"]]
    assert told["one"][0]["findings"] == []


def test_bad_batches_at_random_never_part_the_processes(tmp_path: Path) -> None:
    told = soak(tmp_path, steps=60, ranks=2, seed=1)
    for way in ("ddp", "fsdp"):
        assert told[way].pop("rejected") == [told["bad"]]
        assert told[way].pop("ranks named") > 0
        assert all(told[way].values()), told


SCRIPT = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
for part in (model[0], model[2], model):
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(20):
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    target = x.sum(1, keepdim=True)
    if step == 10 and dist.get_rank() == 1:
        x[3] = float("nan")
    loss = nn.functional.mse_loss(model(x), target)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
finite = all(bool(p.full_tensor().isfinite().all()) for p in model.parameters())
print(f"finite {finite}\\n", end="", flush=True)  # in one piece: the other process prints to the same place
dist.destroy_process_group()
"""


def test_trimtab_run_under_torchrun_guards_every_process_of_a_sharded_model(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = torchrun(2, "-m", "trimtab", "run", "train.py", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("finite True") == 2
    told = [line for line in done.stderr.splitlines() if "step 10: DATA001" in line]
    assert len(told) == 2
    assert all("on rank 1, in sample 3." in line for line in told)
    assert done.stderr.count("20 steps, 1 update kept out of the weights") == 2
    (folder,) = (tmp_path / "trimtab_runs").iterdir()  # one run, that of the other process inside it
    assert (folder / "run.jsonl").is_file()
    assert list(ranks_in(folder)) == [1]
    assert summarise(read_run(folder)).ranks == (OtherRank(rank=1),)
