"""`trimtab run` on scripts that are built in every way: nothing changes while all is well, and a NaN does no harm."""

from __future__ import annotations

import pytest

from tests.run.corpus import CASES, Case
from tests.run.running import Workplace

SURVIVORS = [case for case in CASES if case.nan_at is not None]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_a_healthy_script_runs_as_without(case: Case, workplace: Workplace) -> None:
    plain = workplace.plain(*case.words, own_process=case.own_process == "both", stdin=case.stdin)
    guarded = workplace.guarded(*case.words, own_process=bool(case.own_process), stdin=case.stdin)
    assert [line for line in guarded.findings if not case.finds or case.finds not in line] == []
    assert guarded.out == plain.out
    assert guarded.own_err == plain.own_err
    assert guarded.code == plain.code == case.code
    assert plain.finite is (True if case.nan_at is not None else plain.finite)
    assert case.says in plain.out + plain.err
    if case.guards is not None:
        assert len([line for line in guarded.our_err if "trimtab report" in line]) == case.guards, guarded.err


@pytest.mark.parametrize("case", SURVIVORS, ids=lambda case: case.id)
def test_a_nan_does_no_harm(case: Case, workplace: Workplace) -> None:
    bad = {"NAN_AT": str(case.nan_at)}
    control = workplace.plain(*case.words, stdin=case.stdin, **bad)
    guarded = workplace.guarded(*case.words, stdin=case.stdin, **bad)
    assert control.finite is False, control
    assert guarded.finite is True, guarded
    assert guarded.code == case.code
    assert guarded.own_err == control.own_err
    assert guarded.our_err != []


def test_a_nan_does_no_harm_in_a_process_of_its_own(workplace: Workplace) -> None:
    guarded = workplace.guarded("plain.py", own_process=True, NAN_AT="20")
    assert (guarded.code, guarded.finite, guarded.own_err) == (0, True, []), guarded


@pytest.mark.parametrize("script", ["accumulation", "compiled_after", "complex_model", "container", "policy"])
def test_a_nan_in_the_very_first_batch_does_no_harm(script: str, workplace: Workplace) -> None:
    assert workplace.plain(f"{script}.py", NAN_AT="0").finite is False
    guarded = workplace.guarded(f"{script}.py", NAN_AT="0")
    assert (guarded.code, guarded.finite) == (0, True), guarded


@pytest.mark.parametrize("where", ["forward", "shape", "backward", "build", "clip", "scaler", "closure", "thread"])
def test_an_error_of_the_scripts_own_is_told_as_without(where: str, workplace: Workplace) -> None:
    """A model with a hook is called through one frame of PyTorch more: those frames are left out of the comparison."""
    plain, guarded = workplace.plain("failing.py", where), workplace.guarded("failing.py", where)
    assert guarded.code == plain.code == int(where != "thread")
    assert guarded.out == plain.out
    assert "Error" in plain.err
    assert without_calls(guarded.own_err) == without_calls(plain.own_err)


def without_calls(lines: list[str]) -> list[str]:
    out, inside = [], False
    for line in lines:
        if not line.startswith("    "):
            inside = "torch/nn/modules/module.py" in line
        out += [] if inside else [line]
    return out
