"""`trimtab trace`: an incident for a person and for a machine, found by folder, run or id, and run again."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Trimtab
from tests.cli.test_hostile_files import ESCAPES, is_safe
from tests.matrix import sampled
from trimtab.trace import bundle
from trimtab.trace.bundle import Evidence
from trimtab.trace.origin import Operand, Origin

ORIGIN = Origin(
    cause="op",
    reason="log-of-zero",
    why="the logarithm of 0",
    op="aten.log.default",
    module="head",
    file="/project/train.py",
    line=12,
    code="    return torch.log(x)",
    function="forward",
    samples=(3,),
    operands=(
        Operand(name="self", shape=(4, 2), dtype="float32", smallest=0.0, largest=1.0, num_zero=2),
        Operand(name="dim", shape=(), dtype="", value="-1"),
    ),
    remedy="add a small constant inside the log",
    notes=("the compiled module was replayed as the eager one",),
)


@dataclass
class Call:
    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


LOG = Call("aten.log.default", (torch.tensor([1.0, 0.0, -1.0]),))


@pytest.fixture
def run(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with two incidents, which is the newest one of the working directory."""
    made = tmp_path / "trimtab_runs" / run_dir.name
    shutil.copytree(run_dir, made)
    shutil.rmtree(made / "incidents", ignore_errors=True)
    for step, origin in ((30, replace(ORIGIN, module="body")), (31, ORIGIN)):
        bundle.write(made, origin, Evidence(failing=LOG), step=step)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_person_reads_where_it_came_from(trimtab: Trimtab, run: Path) -> None:
    said = trimtab("trace", run / "incidents" / "step-00000031")
    assert said.code == 0
    for text in (
        "Step 31: NaN or Inf first came from aten.log.default in head",
        "/project/train.py:12 in forward",
        "return torch.log(x)",
        "sample 3",
        "self: float32 (4, 2), 0 to 1, 2 zeros",
        "dim: -1",
        "the logarithm of 0",
        "add a small constant inside the log",
        "the compiled module was replayed as the eager one",
        "made 1 NaN and 1 Inf among 3 values",
        "repro.py",
    ):
        assert text in " ".join(said.out.split()), text


@pytest.mark.parametrize(
    "given",
    [
        (),
        ("step-00000031",),
        ("trimtab_runs",),
        ("RUN",),
        ("RUN/incidents",),
        ("RUN/incidents/step-00000031",),
        ("RUN/incidents/step-00000031/incident.json",),
    ],
)
def test_an_incident_is_found_by_folder_run_or_id(trimtab: Trimtab, run: Path, given: tuple[str, ...]) -> None:
    said = trimtab("trace", *(text.replace("RUN", str(run)) for text in given), "--json")
    assert said.code == 0, said.err
    data = said.json()
    assert data["step"] == 31
    assert Path(data["incident"]).name == "step-00000031"
    assert data["origin"]["module"] == "head"
    assert data["rerun"] == {
        "op": "aten.log.default",
        "reproduced": True,
        "num_nan": 1,
        "num_inf": 1,
        "num_values": 3,
        "error": "",
    }


def test_one_that_does_not_come_again_has_another_exit_code(trimtab: Trimtab, tmp_path: Path) -> None:
    fine = Call("aten.log.default", (torch.ones(2),))
    path = bundle.write(tmp_path, ORIGIN, Evidence(failing=fine), step=1)
    said = trimtab("trace", path)
    assert said.code == 1
    assert "no NaN or Inf" in said.out
    path = bundle.write(tmp_path, ORIGIN, Evidence(), step=2)
    said = trimtab("trace", path)
    assert said.code == 0
    assert "No operands are stored" in said.out
    path = bundle.write(tmp_path, ORIGIN, Evidence(failing=Call("aten.mm.default", (torch.ones(1),))), step=3)
    said = trimtab("trace", path)
    assert said.code == 1
    assert "failed" in said.out


def test_what_is_missing_is_named_with_what_there_is(trimtab: Trimtab, run: Path, tmp_path: Path) -> None:
    said = trimtab("trace", "step-99")
    assert said.code == 2
    assert "step-99" in said.err
    assert "step-00000030, step-00000031" in said.err
    shutil.rmtree(run / "incidents")
    said = trimtab("trace", run)
    assert said.code == 2
    assert "holds no incident" in said.err
    (tmp_path / "empty").mkdir()
    assert trimtab("trace", tmp_path / "empty").code == 2


@pytest.mark.parametrize(
    "value",
    sampled(
        {
            "nothing": None,
            "one": 1,
            "pi": math.pi,
            "escapes": ESCAPES,
            "a list": [ESCAPES],
            "a mapping": {"a": ESCAPES},
            "long": "x" * 5000,
        },
        ["a list"],
    ),
)
def test_a_bundle_with_anything_anywhere(trimtab: Trimtab, run: Path, value: object) -> None:
    path = run / "incidents" / "step-00000031"
    whole = json.loads((path / "incident.json").read_text())
    places = [(inside, key) for inside in (whole, whole["origin"], whole["origin"]["operands"][0]) for key in inside]
    for number, (inside, key) in enumerate(places):
        before, inside[key] = inside[key], value
        (path / "incident.json").write_text(json.dumps(whole))
        inside[key] = before
        said = trimtab("trace", path, *((), ("--json",))[number % 2])
        assert said.code in (0, 1, 2), (key, said)
        assert is_safe(said.out), (key, said)
        assert is_safe(said.err), (key, said)
