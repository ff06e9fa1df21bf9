"""A real wandb run, offline, that the user logs to in his own way: no row of his is lost, and none of ours."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.loggers.kit import NAN_AT, WandbFile, needs, offline, train
from trimtab.compat.training_tags import TrainingTagsSink

__all__ = ["offline"]
pytestmark = [needs("wandb"), pytest.mark.filterwarnings("ignore")]  # wandb's own imports warn
NUM = 40


def begun() -> Any:
    import wandb

    return wandb.init(project="forest", mode="offline")


def check_ours(file: WandbFile, num: int = NUM) -> None:
    """Every row, each on its step."""
    norms = file.series("trimtab/grad/global_norm")
    assert sorted(norms) == list(range(num))
    assert math.isnan(file.series("trimtab/loss")[NAN_AT])
    assert list(file.series("trimtab/health/GRAD001")) == [NAN_AT]


WAYS: dict[str, Callable[[Any, int], object]] = {
    "no step": lambda run, i: run.log({"mine": i, "at": i}),
    "every step": lambda run, i: run.log({"mine": i, "at": i}, step=i),
    "twice a step": lambda run, i: (run.log({"other": i}, step=i), run.log({"mine": i, "at": i}, step=i)),
    "every tenth": lambda run, i: run.log({"mine": i, "at": i}, step=i),
    "epochs": lambda run, i: run.log({"mine": i, "at": i}, step=i // 10),
    "far ahead": lambda run, i: run.log({"mine": i, "at": i}, step=1000 + 5 * i),
    "in parts": lambda run, i: (run.log({"at": i}, commit=False), run.log({"mine": i})),
    "by position": lambda run, i: run.log({"mine": i, "at": i}, i, True),
    "without, then with": lambda run, i: run.log({"mine": i, "at": i}, **({"step": 100 + i} if i > 20 else {})),
    "never": lambda run, i: None,
}
IS_LOGGED: dict[str, Callable[[int], bool]] = {
    "every tenth": lambda i: i % 10 == 0,
    "epochs": lambda i: i % 10 == 9,
    "never": lambda i: False,
}


@pytest.mark.parametrize("flush_every", [0, 1])
@pytest.mark.parametrize("way", WAYS)
def test_no_row_is_lost(offline: Path, way: str, flush_every: int) -> None:
    run = begun()
    wanted = []

    def each(step: int) -> None:
        if IS_LOGGED.get(way, lambda i: True)(step):
            wanted.append(step)
            WAYS[way](run, step)

    train([run], NUM, each, flush_every=flush_every)
    if way == "epochs":
        run.log({"late": 1.0}, step=NUM // 10)  # after the guard is closed
    run.finish()
    file = WandbFile(offline)
    check_ours(file)
    mine = [row["mine"] for row in file.rows if "mine" in row]
    assert mine == wanted, "rows of the user's are lost"
    assert all(row.get("at") == row["mine"] for row in file.rows if "mine" in row), "a row of the user's was torn"
    if way in ("every step", "every tenth"):
        assert all(row["_step"] == row["mine"] for row in file.rows if "mine" in row)
    if way == "twice a step":
        assert [row["_step"] for row in file.rows if "other" in row] == wanted
    if way == "epochs":
        assert any("late" in row for row in file.rows)


def test_the_module_function_and_a_with_block(offline: Path) -> None:
    import wandb

    with wandb.init(project="forest", mode="offline") as run:
        train([run], NUM, lambda i: wandb.log({"mine": i}, step=i))
    file = WandbFile(offline)
    check_ours(file)
    assert [row["_step"] for row in file.rows if "mine" in row] == list(range(NUM))


def test_an_axis_findings_and_the_report(offline: Path) -> None:
    run = begun()
    guard = train([run], 12, lambda i: run.log({"mine": i}), run_dir=offline / "record")
    run.finish()
    file = WandbFile(offline)
    axes = {metric.glob_name or metric.name: metric.step_metric for metric in file.others["metric"]}
    assert axes["trimtab/*"] == "trimtab/step"
    (alert,) = file.others["alert"]
    assert alert.title.startswith("trimtab: LOSS001") or alert.title.startswith("trimtab: GRAD001")
    assert "step 7" in alert.text
    assert guard.run_dir is not None
    assert (guard.run_dir / "report.html").exists()
    (artifact,) = file.others["artifact"]
    assert artifact.type == "report"
    assert [entry.path for entry in artifact.manifest.contents] == ["report.html"]


def test_by_name_a_run_of_its_own_is_begun_and_ended(offline: Path) -> None:
    import wandb

    train(["wandb:forest"], 12)
    assert wandb.run is None, "it was ended"
    file = WandbFile(offline)
    check_ours(file, 12)
    assert file.others["run"][0].project == "forest"


def test_by_name_the_active_run_is_used(offline: Path) -> None:
    import wandb

    run = begun()
    train(["wandb"], 12)
    assert wandb.run is run, "it goes on"
    run.finish()
    check_ours(WandbFile(offline), 12)


def test_two_guards_share_a_run(offline: Path) -> None:
    run = begun()
    train([run], 5, lambda i: run.log({"mine": i}, step=i), nan_at=None)
    train([run], 5, lambda i: run.log({"mine": i}, step=10 + i), nan_at=None)
    run.finish()
    file = WandbFile(offline)
    assert [row["_step"] for row in file.rows if "mine" in row] == [0, 1, 2, 3, 4, 10, 11, 12, 13, 14]
    assert [row["trimtab/step"] for row in file.rows if "trimtab/loss" in row] == [*range(5), *range(5)]


def test_a_run_that_was_finished_first_costs_rows_and_a_line(offline: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = begun()
    with caplog.at_level(logging.WARNING, "trimtab"):
        train([run], 12, lambda i: run.finish() if i == 5 else None, flush_every=1)
    assert "records did not reach it" in caplog.text
    file = WandbFile(offline)
    assert list(file.series("trimtab/loss")) == [0, 1, 2, 3, 4]


def test_other_ranks_stay_silent(offline: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun()
    monkeypatch.setenv("RANK", "1")
    train([run, "wandb"], 5)
    run.finish()
    assert WandbFile(offline).rows == []


SCRIPT = """
import torch, trimtab, wandb
run = wandb.init(project="forest", mode="offline")
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
guard = trimtab.Guard(model, optimizer, sinks=[run], run_dir=False)
for step in range(30):
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    guard.step(loss)
    optimizer.zero_grad()
    run.log({"mine": step}, step=step)
{end}
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "wandb.finish(); guard.close()"])
def test_a_script_that_closes_nothing_loses_nothing(offline: Path, end: str) -> None:
    code = SCRIPT.replace("{end}", end)
    done = subprocess.run([sys.executable, "-c", code], cwd=offline, capture_output=True, text=True, timeout=120)
    assert done.returncode == (3 if "Exit" in end else 0), done.stderr
    file = WandbFile(offline)
    assert [row["_step"] for row in file.rows if "mine" in row] == list(range(30))
    if "finish" not in end:
        assert sorted(file.series("trimtab/loss")) == list(range(30))
    else:  # the run ended before the guard: what was still under way is counted
        assert len(file.series("trimtab/loss")) == 30 or "records did not reach it" in done.stderr


@pytest.mark.parametrize("way", ["no step", "every step", "far ahead"])
def test_the_documented_tags_lose_no_row_either(offline: Path, way: str) -> None:
    run = begun()
    train([TrainingTagsSink(run)], NUM, lambda step: WAYS[way](run, step))
    run.finish()
    file = WandbFile(offline)
    assert sorted(file.series("Training/GradNorm_Before")) == list(range(NUM))
    assert sorted(file.series("Loss/Train")) == list(range(NUM))
    assert sorted(row["at"] for row in file.rows if "at" in row) == list(range(NUM))
    axes = {m.name: m.step_metric for m in file.others["metric"] if m.step_metric}
    assert axes["Loss/Train"] == "trimtab/step"
