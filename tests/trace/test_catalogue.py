"""The catalogue of faults: they are faults, a trace finds where they come from, changes nothing, and can be stored."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch

from tests.trace.catalogue import TUNED
from tests.trace.catalogue_fresh import FRESH
from tests.trace.catalogue_held_out import HELD_OUT
from tests.trace.catalogue_unseen import UNSEEN
from tests.trace.faults_base import Fault, Program, is_bad
from tests.trace.score import answer_of, judged
from trimtab.trace import bundle
from trimtab.trace.bundle import Evidence
from trimtab.trace.origin import Origin
from trimtab.trace.trace import Trace, trace_call

ALL = {**TUNED.faults, **HELD_OUT.faults, **FRESH.faults, **UNSEEN.faults}
pytestmark = pytest.mark.filterwarnings(
    "ignore:std\\(\\):UserWarning", "ignore:var\\(\\):UserWarning", "ignore:Using .torch.compile:UserWarning"
)
REACHED = {"op": 0.95, "line": 0.95, "module": 0.95, "phase": 0.95, "sample": 0.95, "cause": 0.95, "subject": 0.6}
"""Shares that were reached on both halves together; what falls below has become worse."""


def built(fault: Fault) -> Program:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return fault.build()


def traced(program: Program) -> Trace:
    return trace_call(lambda: program.step(program.batch), model=program.model, batch=program.batch)


def state_of(program: Program) -> bytes:
    """Everything that a trace could change, as bytes: two states are the same where these are, NaN included."""
    model, out = program.model, io.BytesIO()
    grads = {name: p.grad for name, p in model.named_parameters()}
    modes = {name: m.training for name, m in model.named_modules()}
    torch.save([model.state_dict(), grads, modes, program.batch, torch.get_rng_state()], out)
    return out.getvalue()


@pytest.mark.parametrize("fault", ALL.values(), ids=ALL)
def test_a_fault_goes_bad_and_a_healthy_program_does_not(fault: Fault) -> None:
    program = built(fault)
    loss = program.step(program.batch)
    assert is_bad(program, loss) == (fault.truth is not None)


def test_there_are_enough_of_them() -> None:
    assert len(ALL) == sum(len(one.faults) for one in (TUNED, HELD_OUT, FRESH, UNSEEN)), "a name is used twice"
    bad = [one for one in ALL.values() if one.truth is not None]
    assert len(bad) >= 40
    assert len([one for one in bad if one.name not in TUNED.faults]) >= len(bad) // 2
    assert sum(bool(one.lines) for one in bad) > 0.6 * len(bad), "the line that is to blame is marked in most of them"
    assert {one.area for one in bad} >= {"forward", "backward", "loss", "data", "parameter", "buffer", "dtype"}


def test_a_trace_names_where_they_come_from() -> None:
    right: dict[str, list[bool]] = {}
    wrong = []
    for fault in ALL.values():
        if fault.truth is None:
            continue
        found = traced(built(fault))
        answer = None if found.origin is None else answer_of(found.origin)
        parts = judged(fault, answer)
        for part, is_right in parts.items():
            right.setdefault(part, []).append(is_right)
        wrong += [(fault.name, part, found.error or answer) for part, is_right in parts.items() if not is_right]
    assert all(right["found"]), wrong
    for part, least in REACHED.items():
        assert sum(right[part]) >= least * len(right[part]), (part, wrong)


@pytest.mark.parametrize("fault", [f for f in ALL.values() if f.truth is None], ids=lambda fault: fault.name)
def test_a_trace_of_a_healthy_program_finds_nothing(fault: Fault) -> None:
    found = traced(built(fault))
    assert found.origin is None
    assert found.error == ""


@pytest.mark.parametrize("fault", ALL.values(), ids=ALL)
def test_a_trace_changes_nothing_and_its_operation_can_be_run_again(fault: Fault, tmp_path: Path) -> None:
    program = built(fault)
    before = state_of(program)
    found = traced(program)
    assert state_of(program) == before, "a trace leaves weights, buffers, gradients, modes and random numbers alone"
    if found.origin is None:
        return
    assert Origin.from_json(found.origin.to_json()) == found.origin
    path = bundle.write(tmp_path, found.origin, Evidence(failing=found.failing, batch=program.batch), step=3)
    assert path is not None
    stored = bundle.read(path)
    assert stored.origin.to_json() == found.origin.to_json()
    assert stored.left_out == ()
    assert len((path / "repro.py").read_text().splitlines()) < 50
    again = bundle.run_again(stored)
    assert (again is None) == (found.failing is None)
    assert again is None or again.bad, again
