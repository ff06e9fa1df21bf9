import json
import math
import shutil
from dataclasses import replace

import pytest


def test_report_tells_what_happened(trimtab, run_dir):
    said = trimtab("report", run_dir)
    assert said.code == 0
    for part in ("RECOVERED", "step 30", "nonfinite-loss", "→", str(run_dir)):
        assert part in said.out, part


def test_report_as_json(trimtab, run_dir):
    data = trimtab("report", run_dir, "--json").json()
    assert data["run_dir"] == str(run_dir)
    summary = data["summary"]
    assert summary["health"] == "recovered"
    assert summary["num_rejected"] == 1
    assert summary["tracks"][0]["num_steps"] == 60
    troubles = {t["finding"]["name"]: t["finding"] for t in summary["incidents"][0]["troubles"]}
    assert troubles["nonfinite-loss"]["evidence"]["loss"] == "NaN"


def test_report_takes_the_newest_run_by_default(trimtab, run_dir, monkeypatch):
    monkeypatch.chdir(run_dir.parent.parent)
    assert (
        trimtab("report", "--json").json()["summary"]["run_id"]
        == trimtab("report", run_dir, "--json").json()["summary"]["run_id"]
    )


COMMANDS = [("report",), ("report", "--html"), ("replay",), ("tune", "clip"), ("tune", "warmup")]


def newer(run_dir, place, name):
    """A folder of runs with the one there is, and a newer one without a record."""
    shutil.copytree(run_dir, place / run_dir.name)
    (place / name).mkdir()
    return place / name


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("record", [None, b""], ids=["missing", "empty"])
@pytest.mark.parametrize("given", [False, True], ids=["default", "given"])
def test_no_command_takes_an_older_run_for_a_newer_one_without_a_record(
    trimtab, run_dir, tmp_path, monkeypatch, words, record, given
):
    monkeypatch.chdir(tmp_path)
    empty = newer(run_dir, tmp_path / "trimtab_runs", "20991231-235959-00017-beef")
    if record is not None:
        (empty / "run.jsonl").write_bytes(record)
    said = trimtab(*words, *(["trimtab_runs"] if given else []))
    assert (said.code, said.out) == (2, "")
    assert f"trimtab_runs/{empty.name}, has no record" in said.err
    assert f"the newest run with a record is trimtab_runs/{run_dir.name}" in said.err
    assert trimtab("report", f"trimtab_runs/{run_dir.name}").code == 0


def test_a_newer_run_whose_first_line_is_damaged_is_the_one_that_is_told_of(trimtab, run_dir, tmp_path):
    broken = newer(run_dir, tmp_path / "runs", "20991231-235959-00017-beef")
    (broken / "run.jsonl").write_bytes(b'{"t":"run","seq":0,"form')
    said = trimtab("report", tmp_path / "runs")
    assert "UNFINISHED" in said.out
    assert str(broken) in said.out


def test_folders_of_others_are_not_taken_for_runs(trimtab, run_dir, tmp_path, monkeypatch):
    """`./runs` is where TensorBoard writes to."""
    monkeypatch.chdir(tmp_path)
    events = newer(run_dir, tmp_path / "runs", "Nov15_21-18-11_host")
    (events / "events.out.tfevents.1").write_bytes(b"x")
    (tmp_path / "runs" / ".20991231-235959-00017-beef.1.new").mkdir()
    assert trimtab("report", "--json").json()["run_dir"] == f"runs/{run_dir.name}"


def test_the_newest_of_both_directories_is_taken(trimtab, run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for parent, year in (("runs", "2098"), ("trimtab_runs", "2099"), ("runs", "2100")):
        name = f"{year}0101-000000-00001-beef"
        shutil.copytree(run_dir, tmp_path / parent / name)
        lines = tmp_path / parent / name / "run.jsonl"
        head, rest = lines.read_text().split("\n", 1)
        info = json.loads(head) | {"started": f"{year}-01-01T00:00:00+00:00"}
        lines.write_text(json.dumps(info, separators=(",", ":")) + "\n" + rest)
        assert trimtab("report", "--json").json()["run_dir"] == f"{parent}/{name}"


def test_replay_is_identical(trimtab, run_dir):
    said = trimtab("replay", run_dir)
    assert said.code == 0, said.out
    assert "IDENTICAL" in said.out
    data = trimtab("replay", run_dir, "--json").json()
    assert data["replay"]["identical"] is True
    assert data["replay"]["num_samples"] == 60


def test_replay_with_other_settings_differs(trimtab, run_dir, tmp_path):
    settings = tmp_path / "other.toml"
    settings.write_text('ignore = ["LOSS001"]\n')
    said = trimtab("replay", run_dir, "--config", settings)
    assert said.code == 1
    assert "DIFFERENT" in said.out
    assert "LOSS001" in said.out
    assert trimtab("replay", run_dir, "--config", tmp_path / "none.toml").code == 2
    settings.write_text('ignor = ["LOSS001"]\n')
    bad = trimtab("replay", run_dir, "--config", settings)
    assert bad.code == 2
    assert "ignore" in bad.err


@pytest.mark.parametrize("command", ["report", "replay"])
def test_what_cannot_be_read_is_said_in_one_line(trimtab, command, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.jsonl").write_bytes(b"\x00\xff not ours\n" * 5)
    (tmp_path / "file").write_text("x")
    monkeypatch.chdir(tmp_path)
    for name in ("nowhere", "empty", "foreign", "file"):
        said = trimtab(command, name)
        assert said.code == 2, name
        assert said.out == ""
        assert said.err.startswith("error: "), name
        assert said.err.count("\n") == 1
    said = trimtab(command)
    assert said.code == 2
    assert "Traceback" not in said.err


@pytest.mark.parametrize("cut", [0.9, 0.5, 0.1])
def test_a_torn_record_is_read_as_far_as_it_goes(trimtab, run_dir, tmp_path, cut):
    torn = tmp_path / "torn"
    shutil.copytree(run_dir, torn)
    for name in ("run.jsonl", "tables.f32"):
        data = (torn / name).read_bytes()
        (torn / name).write_bytes(data[: int(len(data) * cut)])
    said = trimtab("report", torn)
    assert said.code == 0, said.err
    assert "UNFINISHED" in said.out
    assert trimtab("report", torn, "--json").json()["summary"]["ending"] == "not closed"
    again = trimtab("replay", torn)
    assert again.code in (0, 1) or again.err.startswith("error: ")


@pytest.mark.parametrize("lag", [0, 1, 3])
def test_replay_is_identical_for_any_lag_several_optimizers_and_validation(trimtab, tmp_path, lag):
    import torch

    from trimtab import Guard

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 1)})
        optimizers = {
            "a": torch.optim.Adam(model["a"].parameters(), lr=0.01),
            "b": torch.optim.SGD(model["b"].parameters(), lr=0.01),
        }
        x = torch.randn(8, 3)
        with Guard(model, optimizers, {"dir": str(tmp_path / "runs")}, mode="act", lag=lag) as guard:
            for step in range(80):
                scale = math.nan if step in (30, 31, 32) else 1e6 if step == 60 else 1.0
                loss = (scale * model["b"](model["a"](x)).square()).mean()
                loss.backward()
                guard.step(loss, optimizer="all")
                for one in optimizers.values():
                    one.zero_grad()
                if step % 10 == 0:
                    guard.validate(math.nan if step == 50 else 0.5, accuracy=0.9)
    said = trimtab("replay", tmp_path / "runs", "--json")
    assert said.code == 0, said.out
    made = said.json()["replay"]
    assert made["exact_from"] == {"a": 0, "b": 0}
    assert made["num_samples"] == 168
    assert {v["step"] for v in made["verdicts"]} >= {30, 31, 32, 60}
    assert trimtab("report", tmp_path / "runs").code == 0


def test_replay_says_where_it_is_exact(trimtab, run_dir, monkeypatch):
    from trimtab.report import replay as module

    made = replace(
        module.replay(run_dir),
        identical=False,
        exact_from={"g": None, "d": 50},
        differences=tuple(f"difference {i}" for i in range(30)),
        num_differences=30,
    )
    monkeypatch.setattr(module, "replay", lambda *_: made)
    said = trimtab("replay", run_dir)
    assert said.code == 1
    for part in ("g: not exact anywhere", "d: exact from step 50", "difference 19", "and 10 more"):
        assert part in said.out, part
