"""`trimtab doctor` as it is typed: exit codes, spellings, the lines of the sanity tool, JSON, scripts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.matrix import sampled
from trimtab.doctor.examine import all_checks
from trimtab.doctor.short_checklist import PARTS

PASSED = "SANITY CHECK PASSED - Training setup is working correctly!"
FAILED = "SANITY CHECK FAILED - Issues detected in training setup!"
TARGET = """
import torch
from torch import nn

def build():
    torch.manual_seed(0)
    x = torch.randn(96, 6)
    y = x[:, :3].argmax(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
    return {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=1e-2),
            "loader": list(zip(x.split(32), y.split(32))), "loss_fn": nn.functional.cross_entropy}

def frozen():
    given = build()
    given["model"].requires_grad_(False)
    return given

def broken():
    def step(model, batch):
        raise ValueError("no such column")
    given = build()
    given.pop("loss_fn")
    return given | {"step_fn": step}

def unbalanced():
    given = build()
    labels = [(torch.arange(32) == 0).long() * (i == 0) for i in range(3)]
    return given | {"loader": [(x, y) for (x, _), y in zip(given["loader"], labels)]}

def unusable():
    return {"model": 3}
"""
SCRIPT = """
import argparse
import torch
from torch import nn
parser = argparse.ArgumentParser()
parser.add_argument("--wrong_order", default="no")
given = parser.parse_args()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for i in range(100_000):
    x = torch.randn(32, 6)
    if given.wrong_order == "no":
        optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), x[:, :3].argmax(1))
    loss.backward()
    optimizer.step()
    print("step", i)
"""


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("my_doctor_target.py").write_text(TARGET)
    yield "my_doctor_target"
    sys.modules.pop("my_doctor_target", None)


def test_e8_e10_e23_the_documented_command_works_verbatim(trimtab):
    words = "--max_steps 3 --amp_dtype bf16 --grad_log_interval 1 --detect_anomaly false --clip_grad_norm 1.0"
    said = trimtab("doctor", *words.split(" "))
    assert said.code == 0
    assert said.out.rstrip().endswith(PASSED)
    assert "Gradient health: 5/5 non-zero, 0 NaN/Inf" in said.out
    assert "[GRAD] Step    0 | Global:" in said.out
    assert "norm after clip 1" in said.out
    assert "amp bf16" in said.out
    assert "\x1b[" not in said.out


def test_e12_e18_banner_steps_and_closing_line(trimtab, target):
    said = trimtab("doctor", f"{target}:build", "--max-steps", "4")
    assert said.code == 0
    lines = said.out.splitlines()
    assert lines[0].startswith("trimtab ")
    assert "device cpu" in lines[1]
    assert "211 parameters" not in lines[2]  # 6*16+16+16*3+3 = 163
    assert "163 parameters" in lines[2]
    assert sum(text.startswith("Step ") for text in lines) == 4
    assert any("requires_grad True, device cpu" in text for text in lines)
    assert lines[-1] == PASSED


def test_e1_e2_e3_e4_e6_e16_e17_e19_the_checklist_covers_what_was_promised(trimtab, target):
    data = trimtab("doctor", f"{target}:build", "--json").json()
    names = {one["name"]: one for one in data["lines"]}
    for promised in (
        "device-placement", "loss-detached", "needless-scaler", "gradient-underflow", "in-place-hazard",
        "missing-gradient", "loss-not-scalar", "autocast-inactive", "optimizer-settings", "learning-rate",
        "eval-mode", "no-grad", "batchnorm-frozen", "dropout-inactive", "zero-gradient", "nonfinite-gradient",
    ):  # fmt: skip
        assert names[promised]["status"] in ("pass", "not applicable")
        assert names[promised]["evidence"]
    assert data["passed"] is True
    assert data["environment"]["torch"]
    assert len(data["steps"]) == 3
    assert "betas (0.9, 0.999)" in names["optimizer-settings"]["evidence"]


def test_e20_a_failed_check_gives_code_cause_evidence_and_fix_and_exit_1(trimtab, target):
    said = trimtab("doctor", f"{target}:frozen")
    assert said.code == 1
    assert "SANITY CHECK FAILED - 1 failed, " in said.out.splitlines()[-1]
    assert not re.search(r"^\[ok  \] [A-Z]+\d{3}", said.out, flags=re.MULTILINE)  # the summary of eight lines has some
    assert not re.search(r"^\[n/a \] [A-Z]+\d{3}", said.out, flags=re.MULTILINE)
    everything = trimtab("doctor", f"{target}:frozen", "-v").out
    assert everything.rstrip().endswith(FAILED)
    assert "[ok  ]" in everything
    assert everything.count("[FAIL] GRAD005") == 2  # in its place, and again at the end
    assert "[FAIL] GRAD005" in said.out
    assert "fix: model.requires_grad_(True)" in said.out
    assert "trimtab explain missing-gradient" in said.out


def test_a_pass_says_how_much_was_not_checked(trimtab, target):
    said = trimtab("doctor", f"{target}:build")
    assert said.code == 0
    assert re.fullmatch(r"SANITY CHECK PASSED - (\d+ warnings?, )?\d+ passed, \d+ could not be checked",
                        said.out.splitlines()[-1])  # fmt: skip
    assert "working correctly" not in said.out


def test_formats_for_ci_systems(trimtab, target):
    junit = trimtab("doctor", f"{target}:frozen", "--format", "junit", "-o", "out/doctor.xml")
    assert (junit.code, junit.out) == (1, "out/doctor.xml\n")
    suite = ElementTree.parse("out/doctor.xml").getroot()[0]
    assert suite.get("failures") == "1"
    assert len(suite) == int(suite.get("tests"))
    assert len(suite.findall("testcase/skipped")) == int(suite.get("skipped"))
    (failure,) = suite.findall("testcase/failure")
    assert "Fix: model.requires_grad_(True)" in failure.text
    sarif = json.loads(trimtab("doctor", f"{target}:frozen", "--format", "sarif").out)
    (result,) = [one for one in sarif["runs"][0]["results"] if one["level"] == "error"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my_doctor_target.py"
    assert TARGET.splitlines()[place["region"]["startLine"] - 1] == "def frozen():"
    assert result["ruleId"] in {rule["id"] for rule in sarif["runs"][0]["tool"]["driver"]["rules"]}
    said = trimtab("doctor", f"{target}:frozen", "--format", "github")
    assert said.out.startswith("::error file=my_doctor_target.py,line=")
    assert all(line.startswith("::") for line in said.out.splitlines())
    assert trimtab("doctor", f"{target}:build", "--format", "yaml").code == 2
    assert trimtab("doctor", f"{target}:build", "-o", "x").code == 2


def test_an_exception_of_the_step_is_a_finding_and_an_unusable_target_is_not(trimtab, target):
    said = trimtab("doctor", f"{target}:broken", "--json", "true")
    assert said.code == 1
    data = said.json()
    assert [one["name"] for one in data["lines"] if one["status"] == "fail"] == ["step-exception"]
    assert "no such column" in data["tracebacks"][0]
    assert trimtab("doctor", f"{target}:unusable").code == 2
    assert trimtab("doctor", "no_such_module:build").code == 2
    assert trimtab("doctor", f"{target}:build", "--amp_dtype", "int8").code == 2


def test_warnings_fail_only_when_strict_and_checks_can_be_chosen(trimtab, target):
    assert trimtab("doctor", f"{target}:unbalanced", "--select", "class-balance").code == 0
    assert trimtab("doctor", f"{target}:unbalanced", "--select", "class-balance", "--strict").code == 1
    data = trimtab("doctor", f"{target}:frozen", "--ignore", "GRAD,WIRE,UPD", "--json").json()
    assert {one["code"][:4] for one in data["lines"]} & {"GRAD", "WIRE"} == set()


def test_e5_another_batch_size(trimtab, target):
    data = trimtab("doctor", f"{target}:build", "--batch_size", "8", "--json").json()
    assert data["steps"][0]["batch"][0].startswith("0 [8, 6]")


def test_the_project_named_in_the_settings_is_examined(trimtab, target):
    Path("trimtab.toml").write_text(f'doctor = "{target}:frozen"\n')
    assert trimtab("doctor", "--json").json()["target"] == f"{target}:frozen"
    Path("trimtab.toml").write_text('docter = "x:y"\n')
    said = trimtab("rules", "--json")
    assert said.code in (0, 2)


def test_explain_knows_the_checks(trimtab):
    said = trimtab("explain", "gradcheck")
    assert said.code == 0
    assert "## How it is checked" in said.out
    assert trimtab("explain", "WIRE004", "--json").json()["name"] == "loss-ignores-input"


@pytest.mark.parametrize(
    ("words", "code", "name"),
    sampled({"sound": ((), 0, ""), "wrong order": (("--wrong_order", "yes"), 1, "stale-gradient")}, ["wrong order"]),
)
def test_a_script_is_run_for_its_first_steps_and_stopped(words, code, name):
    Path("train.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", "doctor", "--select", "GRAD,UPD,MODE", "train.py", *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert name in done.stdout
    assert "step 99" not in done.stderr
    assert f"SANITY CHECK {'PASSED' if code == 0 else 'FAILED'} - " in done.stdout.splitlines()[-1]


def test_e13_e20_the_gradient_line_and_the_checklist_of_eight_lines(trimtab, target):
    said = trimtab("doctor", "-v", f"{target}:build").out
    assert re.search(
        r"\[GRAD\] Step    0 \| Global: \S+ \| Zero: 0/4 \| NaN/Inf: 0/4 \| Max: \S+ \| Avg: \S+ \| R", said
    )
    lines = [line for line in said.splitlines() if line[:6] in ("[ok  ]", "[WARN]", "[FAIL]", "[n/a ]")][-8:]
    assert [line[7:].partition(":")[0] for line in lines] == [title for title, _ in PARTS]
    assert "lr 0.01" in lines[5]
    assert lines[1].startswith("[n/a ] AMP: ")
    assert "[FAIL] Gradient health: missing-gradient" in trimtab("doctor", f"{target}:frozen").out


def test_e20_every_check_has_one_place_in_the_checklist():
    named = [name for _, names in PARTS for name in names]
    assert set(named) <= {check.name for check in all_checks()}
    assert len(named) == len(set(named)), "none is in two parts"
