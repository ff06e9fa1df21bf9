from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trimtab.drill.worker import answer

ROOT = Path(__file__).parents[2]
TARGETS = f"{ROOT}/tests/drill/targets.py"
SHORT = ("--steps", "50", "--onset", "25")


class InProcess:
    """A child that is none: starting one takes longer than all else."""

    def __init__(self, env):
        assert "TRIMTAB_DISABLE" not in env

    def ask(self, task, timeout_s):
        assert timeout_s > 0
        return answer(task, [])

    def __enter__(self):
        return self

    def __exit__(self, *error):
        torch.manual_seed(0)


@pytest.fixture
def in_process(monkeypatch):
    monkeypatch.setattr("trimtab.drill.session.Child", InProcess)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(logging.getLogger("trimtab"), "disabled", True)


@pytest.mark.long
def test_a_drill_prints_its_table_and_leaves_everything_as_it_was(trimtab):
    rng, here, files = torch.get_rng_state(), Path.cwd(), sorted(os.listdir())
    said = trimtab("drill", f"{TARGETS}:talks", *SHORT, "--select", "bit-flip,nan-in-inputs")
    assert said.code == 0
    lines = said.out.splitlines()
    assert "mode observe" in " ".join(lines[:2])
    assert any(line.split()[:4] == ["bit-flip", "numerics", "weight-corrupted", "0"] for line in lines)
    assert lines[-1].startswith("Found 2 of 2 harmful faults; median in the step they began; 0 false alarms in 50 ")
    assert "\x1b" not in said.out
    assert "printed by the training" not in said.out
    assert torch.equal(rng, torch.get_rng_state())
    assert (Path.cwd(), sorted(os.listdir())) == (here, files)


def test_json_html_and_a_fault_that_has_no_place(trimtab, in_process, tmp_path):
    page = tmp_path / "drill.html"
    said = trimtab(
        "drill", f"{TARGETS}:by_itself", *SHORT, "--select=nan-in-weight,nan-in-loss", "--html", page, "--json", "true"
    )
    data = said.json()
    assert said.code == 0
    assert data["passed"] is True
    assert data["score"]["num_not_applicable"] == 1
    assert {row["fault"]: row["status"] for row in data["report"]["rows"]} == {
        "nan-in-weight": "found",
        "nan-in-loss": "not applicable",
    }
    assert "The guard holds" in page.read_text()


def test_a_false_alarm_on_the_clean_run_exits_1(trimtab, in_process):
    said = trimtab("drill", f"{TARGETS}:alarming", *SHORT, "--select", "bit-flip")
    assert said.code == 1
    assert "FALSE ALARM  OPT" in said.out


def test_an_act_of_the_guard_has_a_column_and_seeds_have_one(trimtab, in_process):
    said = trimtab("drill", f"{TARGETS}:build", *SHORT, "--select", "nan-in-gradient", "--mode", "advise", "--seeds=2")
    assert said.code == 0
    head = next(line for line in said.out.splitlines() if line.startswith("fault"))
    assert head.split() == ["fault", "group", "seed", "found", "by", "after", "unguarded", "guarded"]
    assert "Found 2 of 2 harmful faults" in said.out


def test_time_that_runs_out_is_told(trimtab, in_process, monkeypatch):
    clock = iter(range(0, 10_000, 40))
    monkeypatch.setattr("trimtab.drill.session.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    data = trimtab("drill", f"{TARGETS}:build", *SHORT, "--select", "state,bit-flip", "--json").json()
    late = [row for row in data["report"]["rows"] if row["status"] == "not run"]
    assert 0 < len(late) < len(data["report"]["rows"])
    assert "the budget was spent" in late[0]["reason"]
    assert data["report"]["cost_percent"] is None


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("nowhere:build",), "there is no module 'nowhere'"),
        ((f"{TARGETS}:raises",), "raised without any fault at step 0 (seed 0): KeyError"),
        ((f"{TARGETS}:build", "--select", "nonsense"), "there is no fault or group 'nonsense'"),
        ((f"{TARGETS}:build", "--select", "amp", *SHORT), "no fault could be injected into"),
    ],
)
def test_what_cannot_be_drilled_exits_2(trimtab, in_process, words, why):
    said = trimtab("drill", *words)
    assert said.code == 2
    assert why in " ".join(said.err.split())
