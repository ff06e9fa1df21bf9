"""`trimtab checkpoint`: what a person sees, what a machine reads, and how it ends."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four checkpoints (good, good, bad, candidate) and one in quarantine."""
    import torch
    from torch import nn

    from trimtab import Checkpointer

    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 15)
        ckpt = Checkpointer(folder, keep_last=10, quiet_steps=10)
        for step in range(1, 42):
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 10 == 0:
                objects: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
                ckpt.save(step, **objects, metrics={"loss": 1 / step}, extra={"epoch": step // 10})
            if step == 35:
                ckpt.condemn(30, "LOSS002 loss-spike at step 35")
        with torch.no_grad():
            model[0].weight[0, 0] = math.nan
        ckpt.save(41, **objects)
        torch.save({"model_state_dict": model.state_dict(), "epoch": 4}, folder.parent / "old.pth")
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, "checkpoints")
    shutil.copy(saved.parent / "old.pth", "old.pth")
    return Path("checkpoints")


def flip(file: Path, at: int = -3) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0x10
    file.write_bytes(data)


def narrow(out: str) -> bool:
    return max(map(len, out.splitlines())) <= 80


# -- list -----------------------------------------------------------------------------------------------------------


def test_list_marks_what_resume_takes_and_sets_the_quarantine_apart(trimtab, folder):
    said = trimtab("checkpoint", "list", folder)
    assert said.code == 0
    assert narrow(said.out)
    assert "\x1b" not in said.out
    lines = said.out.splitlines()
    assert lines[0].startswith("4 checkpoints in checkpoints")
    shown = [line.split()[:3] for line in lines if "loss 0." in line]
    assert shown == [["10", "good", shown[0][2]], ["20", "good", shown[1][2]], ["30", "bad", shown[2][2]], shown[3]]
    assert shown[3][:3] == ["→", "40", "candidate"]
    assert "LOSS002 loss-spike at step 35" in said.out
    assert "quarantine" in said.out
    assert said.out.index("quarantine") < said.out.index("0.weight")
    assert 'prefer="good" it takes step 20' in " ".join(said.out.split())


def test_list_is_the_default_folder_and_json(trimtab, folder):
    data = trimtab("checkpoint", "list", "--json").json()
    assert data["resume"] == "step-00000040"
    assert [(one["step"], one["state"]) for one in data["checkpoints"]] == [
        (10, "good"),
        (20, "good"),
        (30, "bad"),
        (40, "candidate"),
    ]
    assert [one["step"] for one in data["quarantine"]] == [41]
    first = data["checkpoints"][0]
    assert first["metrics"] == {"loss": 0.1}
    assert first["num_bytes"] > 1000
    assert first["created"].endswith("+00:00")
    assert len(first["digest"]) == 64


def test_list_changes_nothing_and_works_without_the_right_to_write(trimtab, folder):
    before = sorted(str(p) for p in folder.rglob("*"))
    for words in (["list"], ["verify"], ["show"], ["diff", folder, "10", "20"]):
        trimtab("checkpoint", *words[:1], *(words[1:] or [folder]))
    assert sorted(str(p) for p in folder.rglob("*")) == before
    trimtab("checkpoint", "list", "nowhere")
    assert not Path("nowhere").exists()


def test_list_tells_a_damaged_one_and_goes_on(trimtab, folder):
    (folder / "step-00000040" / "COMMIT").unlink()
    said = trimtab("checkpoint", "list", folder)
    assert said.code == 0
    assert "damaged" in said.out
    assert "COMMIT: is missing" in said.out
    assert trimtab("checkpoint", "list", folder, "--json").json()["resume"] == "step-00000020"


def test_list_shows_branches_only_where_there_are_some(trimtab, folder):
    assert "branch" not in trimtab("checkpoint", "list", folder).out
    import torch

    from trimtab import Checkpointer

    Checkpointer(folder, keep_last=10).save(20, model=torch.nn.Linear(1, 1), branch=1)
    said = trimtab("checkpoint", "list", folder)
    assert "branch" in said.out
    assert trimtab("checkpoint", "list", folder, "--json").json()["resume"] == "step-00000020-b1"


def test_list_of_nothing_but_quarantine(trimtab, folder):
    for one in folder.glob("step-*"):
        shutil.rmtree(one)
    said = trimtab("checkpoint", "list", folder)
    assert said.code == 0
    assert "Nothing here to resume from" in said.out
    assert trimtab("checkpoint", "verify", folder).code == 2
    assert trimtab("checkpoint", "verify", folder, "--all").code == 0


# -- verify ---------------------------------------------------------------------------------------------------------


def test_verify_says_that_all_is_sound(trimtab, folder):
    said = trimtab("checkpoint", "verify", folder)
    assert said.code == 0
    assert said.out.count("SOUND") == 4
    assert "4 of 4 checkpoints are sound; resume takes step 40." in said.out
    assert trimtab("checkpoint", "verify", folder, "--all").out.count("SOUND") == 5


def test_verify_names_file_and_tensor_and_what_resume_takes_instead(trimtab, folder):
    flip(folder / "step-00000040" / "optimizer.safetensors")
    flip(folder / "step-00000020" / "model.safetensors")
    said = trimtab("checkpoint", "verify", folder)
    assert said.code == 1
    assert narrow(said.out)
    assert "optimizer.safetensors: tensor 'exp_avg_sq.2.bias' is not what was written" in " ".join(said.out.split())
    assert "model.safetensors: tensor " in said.out
    assert "2 of 4 checkpoints are sound; resume takes step 10." in said.out
    data = trimtab("checkpoint", "verify", folder, "--json").json()
    assert data["sound"] is False
    assert [one["sound"] for one in data["checkpoints"]] == [True, False, True, False]
    assert data["checkpoints"][3]["damage"][0]["file"] == "optimizer.safetensors"


@pytest.mark.parametrize("file", ["manifest.json", "COMMIT", "status.json", "model.safetensors", "rng.safetensors"])
def test_verify_finds_damage_in_every_file(trimtab, folder, file):
    flip(folder / "step-00000020" / file, at=20)
    said = trimtab("checkpoint", "verify", folder, "--step", "20")
    assert said.code == 1
    assert f"- {file}: " in said.out
    assert trimtab("checkpoint", "verify", folder, "--step", "10").code == 0
    assert trimtab("checkpoint", "verify", folder / "step-00000020").code == 1


# -- show -----------------------------------------------------------------------------------------------------------


def test_show_tells_sections_tensors_versions_and_metrics(trimtab, folder):
    said = trimtab("checkpoint", "show", folder, "--step", "20")
    assert said.code == 0
    assert narrow(said.out)
    words = " ".join(said.out.split())
    assert words.startswith("GOOD step 20")
    for told in ("metrics loss 0.05", "torch ", "0.weight float32 16 x 8 512 B", "exp_avg.0.weight float32 16 x 8"):
        assert told in words
    assert "without tensors scheduler, extra" in words
    assert "gradients 0 tensors" not in words
    assert "more; --all lists them" in words
    assert "more" not in trimtab("checkpoint", "show", folder, "--all").out


def test_show_of_a_folder_is_what_resume_takes_and_json_has_all(trimtab, folder):
    data = trimtab("checkpoint", "show", folder, "--json").json()["checkpoint"]
    assert data["snapshot"]["step"] == 40
    sections = {section["name"]: section for section in data["sections"]}
    assert {"model", "optimizer", "scheduler", "extra", "rng"} <= set(sections)
    assert {"name": "0.weight", "dtype": "float32", "shape": [16, 8], "num_bytes": 512} in sections["model"]["tensors"]
    assert data["meta"]["metrics"] == {"loss": 0.025}
    assert trimtab("checkpoint", "show", folder / "30", "--json").json()["checkpoint"]["snapshot"]["state"] == "bad"


def test_show_of_the_reason_and_of_one_that_was_repaired(trimtab, folder):
    assert "LOSS002 loss-spike" in trimtab("checkpoint", "show", folder, "--step", "30").out
    assert "NaN or Inf: model.0.weight" in trimtab("checkpoint", "show", folder, "--step", "41").out
    import torch

    from trimtab.compat.checkpoint_pair import save_checkpoint

    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, math.nan)
    save_checkpoint("best", model, clean=True)
    assert "Repaired" in trimtab("checkpoint", "show", "best").out
    assert "repaired" in trimtab("checkpoint", "list", "best").out


def test_show_of_a_foreign_file_warns_of_nan_and_runs_nothing(trimtab, folder):
    said = trimtab("checkpoint", "show", "old.pth")
    assert said.code == 0
    assert "FOREIGN" in said.out
    assert "NaN or Inf in model_state_dict.0.weight" in said.out
    data = trimtab("checkpoint", "show", "old.pth", "--json").json()["checkpoint"]
    assert data["snapshot"] is None
    assert [section["name"] for section in data["sections"]] == ["model_state_dict", "epoch"]
    import torch

    torch.save({"thing": Payload()}, "evil.pt")
    said = trimtab("checkpoint", "show", "evil.pt")
    assert said.code == 2
    assert "evil.pt" in said.err
    assert not Path("owned").exists()


class Payload:
    """What runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


# -- diff -----------------------------------------------------------------------------------------------------------


def test_diff_of_two_steps(trimtab, folder):
    said = trimtab("checkpoint", "diff", folder, "10", "20")
    assert said.code == 1
    assert narrow(said.out)
    assert "DIFFERENT" in said.out
    assert "0.weight" in said.out
    assert "optimizer.param_groups.0.lr: 0.01 → 0.001" in said.out
    assert "scheduler.last_epoch: 10 → 20" in said.out
    assert "also different  rng (" in said.out
    assert trimtab("checkpoint", "diff", folder, "10", "30").code == 1
    data = trimtab("checkpoint", "diff", folder / "10", folder / "step-00000020", "--json").json()
    assert data["identical"] is False
    ranked = [one["relative"] for one in data["difference"]["tensors"] if isinstance(one["relative"], float)]
    assert len(ranked) > 15
    assert ranked == sorted(ranked, reverse=True)


def test_diff_of_the_same_and_of_a_copy(trimtab, folder):
    shutil.copytree(folder, "copy")
    said = trimtab("checkpoint", "diff", folder / "10", "copy/10")
    assert said.code == 0
    assert "IDENTICAL" in said.out
    assert trimtab("checkpoint", "diff", folder, "10", "10", "--json").json()["identical"] is True


def test_diff_of_a_foreign_file_compares_what_both_have(trimtab, folder):
    said = trimtab("checkpoint", "diff", "old.pth", folder / "40")
    assert said.code == 1
    assert "NaN/Inf  0.weight" in said.out
    assert "exp_avg" not in said.out
    assert trimtab("checkpoint", "diff", "old.pth", "old.pth").code == 0


def test_diff_tells_shapes_and_what_is_missing(trimtab):
    import torch

    from trimtab.compat.checkpoint_pair import save_checkpoint

    save_checkpoint("a", torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)))
    save_checkpoint("b", torch.nn.Sequential(torch.nn.Linear(2, 4)))
    words = " ".join(trimtab("checkpoint", "diff", "a", "b").out.split())
    assert "only a 1.weight float32 (1, 3)" in words
    assert "other 0.weight float32 (3, 2) → float32 (4, 2)" in words


# -- prune ----------------------------------------------------------------------------------------------------------


def steps(folder: Path) -> list[str]:
    return sorted(one.name[-2:] for one in folder.glob("step-*"))


def test_prune_keeps_the_last_good_one_whatever_is_asked(trimtab, folder):
    said = trimtab("checkpoint", "prune", folder, "--keep-last", "1")
    assert said.code == 0
    assert steps(folder) == ["20", "30", "40"]  # the newest, the newest good one, and the evidence
    assert "step-00000010" in said.out
    assert "freed; 4 checkpoints stay" in said.out


def test_prune_dry_run_deletes_nothing_and_says_what_it_would_free(trimtab, folder):
    said = trimtab("checkpoint", "prune", folder, "--keep-last", "1", "--dry-run")
    assert steps(folder) == ["10", "20", "30", "40"]
    assert "would be deleted" in said.out
    assert "would be freed" in said.out
    data = trimtab("checkpoint", "prune", folder, "--keep-last=1", "--dry-run", "true", "--json").json()
    assert [one["step"] for one in data["deleted"]] == [10]
    assert data["freed_bytes"] == data["deleted"][0]["num_bytes"] > 0
    assert steps(folder) == ["10", "20", "30", "40"]


def test_prune_by_best_every_budget_and_bad(trimtab, folder):
    shutil.copytree(folder, "again")
    trimtab("checkpoint", "prune", folder, "--keep-last", "1", "--keep-best", "loss")
    assert steps(folder) == ["10", "20", "30", "40"]  # 1/10 is the largest
    trimtab("checkpoint", "prune", folder, "--keep-last", "1", "--keep-best", "-loss", "--keep_every", "20", "--bad")
    assert steps(folder) == ["20", "40"]
    assert os.listdir(folder / "quarantine") == []
    trimtab("checkpoint", "prune", "again", "--keep-last", "9", "--max-bytes", "1KB")
    assert steps(Path("again")) == ["20", "30", "40"]


def test_prune_reads_what_it_relies_on_and_keeps_an_earlier_one_where_that_is_damaged(trimtab, folder):
    for step in (20, 40):
        flip(folder / f"step-000000{step}" / "model.safetensors")
    said = trimtab("checkpoint", "prune", folder, "--keep-last", "1")
    assert "10" in steps(folder)  # the last good one that is sound
    assert said.out.count("is damaged") == 2
    assert trimtab("checkpoint", "prune", folder, "--json").json()["damaged"] == ["step-00000020", "step-00000040"]


def test_prune_tells_what_could_not_be_deleted(trimtab, folder, monkeypatch):
    from trimtab.checkpoint import retention

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(retention, "remove", refuse)
    said = trimtab("checkpoint", "prune", folder, "--keep-last", "1")
    assert said.code == 1
    assert "could not be deleted: Permission denied" in said.out
    assert "0 B freed" in said.out


# -- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["list", "nowhere"], "there is no folder nowhere"),
        (["list", "nowhere"], "nearby: checkpoints"),
        (["list", "."], "nearby: checkpoints"),
        (["list", "."], "trimtab checkpoint show old.pth"),
        (["verify", "old.pth"], "trimtab checkpoint show old.pth"),
        (["show", "note.txt"], "is a file; checkpoints are folders"),
        (["show", "checkpoints", "--step", "7"], "there are: 10, 20, 30, 40"),
        (["verify", "checkpoints", "--step", "7"], "no checkpoint of step 7"),
        (["diff", "checkpoints", "10"], "diff checkpoints 10 OTHER_STEP"),
        (["diff", "checkpoints", "ten", "20"], "'ten' is not a step"),
        (["diff", "checkpoints/10", "checkpoints/11"], "no checkpoint of step 11"),
        (["diff", "old.pth", "note.txt"], "note.txt"),
        (["prune", "checkpoints", "--max-bytes", "ten"], "'ten' is no size"),
        (["prune", "checkpoints", "--keep-last", "0"], "keep_last is 0"),
        (["prune", "checkpoints", "--keep-every", "0"], "keep_every is 0"),
        (["prune", "checkpoints/step-00000010"], "is one checkpoint"),
    ],
)
def test_what_cannot_be_done_exits_2_in_one_line(trimtab, folder, words, told):
    Path("note.txt").write_text("x")
    said = trimtab("checkpoint", *words)
    assert (said.code, said.out) == (2, "")
    assert told in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1


def test_a_run_folder_given_by_mistake_is_explained(trimtab, folder, run_dir):
    said = trimtab("checkpoint", "list", run_dir)
    assert said.code == 2
    assert "is the record of a run" in said.err
    assert f"trimtab report {run_dir}" in said.err
    shutil.copytree(run_dir, "run")
    shutil.copytree(folder, "run/checkpoints")
    assert "nearby: run/checkpoints" in trimtab("checkpoint", "list", "run").err


def test_diff_of_a_damaged_one_exits_2_and_names_the_file(trimtab, folder):
    flip(folder / "step-00000020" / "model.safetensors")
    said = trimtab("checkpoint", "diff", folder, "10", "20")
    assert said.code == 2
    assert "model.safetensors" in said.err


def test_a_checkpoint_that_a_killed_save_left_beside_is_found(trimtab):
    import torch

    from trimtab.compat.checkpoint_pair import save_checkpoint

    save_checkpoint("best", torch.nn.Linear(1, 1))
    os.rename("best", "best~old")
    assert "best~old" in trimtab("checkpoint", "show", "best").out


def test_help_lists_the_commands_and_imports_no_torch(trimtab):
    from tests.cli.test_app import python

    done = python(
        "import sys\n"
        "from trimtab.cli.app import main\n"
        "try: main(['checkpoint', '--help'])\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "import trimtab.report.checkpoint_text\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert done.returncode == 0, done.stderr
    for name in ("list", "verify", "show", "diff", "prune"):
        assert name in done.stdout


def test_no_color_and_colours(folder):
    from tests.cli.test_app import shell

    words = ("trimtab", "checkpoint", "list", str(folder))
    import sys

    run = (sys.executable, "-m", *words)
    assert "\x1b" not in shell(*run).stdout
    assert "\x1b[" in shell(*run, FORCE_COLOR="1").stdout
    assert json.loads(shell(*run, "--json", FORCE_COLOR="1").stdout)["resume"] == "step-00000040"


# -- several runs ---------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two runs in one folder, the later one with lower steps."""
    import torch

    from trimtab import Checkpointer

    for steps in ((100, 200, 300), (10, 20)):
        with Checkpointer("runs", keep_last=9, quiet_steps=1000) as ckpt:
            ckpt.claim()
            for step in steps:
                ckpt.save(step, model=torch.nn.Linear(1, 1))
    return Path("runs")


def test_list_is_in_the_order_of_saving_and_names_the_runs(trimtab, runs):
    said = trimtab("checkpoint", "list", runs)
    rows = [line.replace("→", " ").split() for line in said.out.splitlines() if "candidate" in line]
    assert [row[0] for row in rows] == ["100", "200", "300", "10", "20"]
    names = [row[1] for row in rows]
    assert names[0] == names[1] == names[2] != names[3] == names[4]
    (marked,) = [line for line in said.out.splitlines() if line.startswith("→ ") and "candidate" in line]
    assert marked.split()[1] == "20"
    told = trimtab("checkpoint", "list", runs, "--json").json()
    assert told["resume"] == "step-00000020"
    assert [one["sequence"] for one in told["checkpoints"]] == [1, 2, 3, 4, 5]
    assert [one["run"] for one in told["checkpoints"]] == names


def test_a_run_is_chosen_by_name(trimtab, runs):
    first = trimtab("checkpoint", "list", runs, "--json").json()["checkpoints"][0]["run"]
    assert "step 300 of run" in trimtab("checkpoint", "show", runs, "--run", first).out
    assert "step 20 of run" in trimtab("checkpoint", "show", runs).out
    assert trimtab("checkpoint", "verify", runs, "--run", first[:-1]).out.count("SOUND") == 3
    said = trimtab("checkpoint", "verify", runs, "--run", "nobody")
    assert said.code == 2
    assert first in said.err


def test_prune_goes_run_by_run(trimtab, runs):
    left = trimtab("checkpoint", "prune", runs, "--keep-last", "1", "--json").json()
    assert [one["step"] for one in left["kept"]] == [300, 20]
    first = left["kept"][0]["run"]
    assert trimtab("checkpoint", "prune", runs, "--run", first, "--old-runs").code == 2
    assert [
        one["step"] for one in trimtab("checkpoint", "prune", runs, "--max-bytes", "1", "--json").json()["kept"]
    ] == [
        300,
        20,
    ]
    gone = trimtab("checkpoint", "prune", runs, "--old-runs", "--json").json()
    assert [one["step"] for one in gone["deleted"]] == [300]
    assert [one["step"] for one in gone["kept"]] == [20]


def test_prune_of_one_run_leaves_the_others_alone(trimtab, runs):
    first = trimtab("checkpoint", "list", runs, "--json").json()["checkpoints"][0]["run"]
    told = trimtab("checkpoint", "prune", runs, "--keep-last", "1", "--max-bytes", "1", "--run", first, "--json").json()
    assert [one["step"] for one in told["kept"]] == [300, 10, 20]


def test_earlier_runs_stay_while_the_newest_has_nothing_sound(trimtab, runs):
    for name in ("step-00000010", "step-00000020"):
        flip(runs / name / "model.safetensors")
    said = trimtab("checkpoint", "prune", runs, "--old-runs")
    assert said.code == 2
    assert "has no sound checkpoint to resume from: those of earlier runs stay" in said.err
    assert len(list(runs.glob("step-*"))) == 5


def test_a_lost_status_is_shown_and_never_pruned(trimtab, folder):
    (folder / "step-00000040" / "status.json").write_text("")
    said = trimtab("checkpoint", "list", folder)
    assert "doubtful" in said.out
    assert "whether it was condemned is not known" in " ".join(said.out.split())
    assert trimtab("checkpoint", "list", folder, "--json").json()["resume"] == "step-00000020"
    assert trimtab("checkpoint", "verify", folder).code == 1
    kept = trimtab("checkpoint", "prune", folder, "--bad", "--keep-last", "1", "--json").json()["kept"]
    assert [one["step"] for one in kept] == [20, 40]
