"""What a CI system reads cannot be broken by what a training says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.doctor.checklist import Line, Report, Status
from trimtab.doctor.ci_formats import counts, place_of, to_github, to_junit, to_sarif

TESTS = """
import torch

def build():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    model = torch.nn.Linear(4, 1)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
            "loader": [(b, b.sum(1, keepdim=True)) for b in x.split(16)], "loss_fn": torch.nn.functional.mse_loss}

def frozen():
    given = build()
    given["model"].requires_grad_(False)
    return given

def test_sound(trimtab_doctor):
    assert trimtab_doctor(build, select=["GRAD", "OPT"]).ok

def test_a_dict_and_options(trimtab_doctor):
    assert len(trimtab_doctor(build(), select=["GRAD"], max_steps=4).steps) == 4

def test_frozen(trimtab_doctor):
    trimtab_doctor(frozen)
"""

texts = st.text(max_size=30)
lines = st.builds(
    Line,
    code=st.sampled_from(["WIRE001", "GRAD005"]),
    name=texts,
    title=texts,
    status=st.sampled_from(Status),
    evidence=texts,
    cause=texts,
    fix=texts,
)


@given(found=st.lists(lines, max_size=5), strict=st.booleans(), spec=texts)
def test_any_text_is_well_formed(found: list[Line], strict: bool, spec: str) -> None:
    report = Report(lines=tuple(found))
    num_wrong = sum(not line.ok for line in found)
    suite = ElementTree.fromstring(to_junit(spec, report, strict=strict).encode("utf-8", "replace"))[0]
    num_failed = len(report.of(Status.FAIL)) + strict * len(report.of(Status.WARN))
    assert len(suite.findall("testcase/failure")) == int(suite.get("failures", "")) == num_failed
    sarif = json.loads(to_sarif(spec, report, strict=strict))
    assert len(sarif["runs"][0]["results"]) == num_wrong
    told = to_github(spec, report, strict=strict).splitlines()
    assert len(told) == num_wrong + 1
    assert all(line.startswith(("::error ", "::warning ", "::notice ")) for line in told)


def test_counts() -> None:
    line = {"code": "A", "name": "a", "title": "a"}
    some = [Line(**line, status=s) for s in (Status.PASS, Status.PASS, Status.NA, Status.WARN, Status.FAIL)]
    assert counts(Report(lines=tuple(some))) == "1 failed, 1 warning, 2 passed, 1 could not be checked"


@pytest.mark.parametrize(
    "spec", ["", ":", "x:y", "../../etc/passwd.py:f", "/etc/hosts:f", "os:getcwd", "a.b.c:d", "\x00.py:f"]
)
def test_a_place_outside_the_repository_is_none(spec: str) -> None:
    assert place_of(spec).path == ""


@pytest.mark.long
def test_the_fixture_of_pytest() -> None:
    Path("test_mine.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "trimtab.integrations.pytest_plugin", "test_mine.py"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "fix:  model.requires_grad_(True)" in done.stdout
    assert "could not be checked" in done.stdout
