"""`trimtab run` on scripts that are built in every way: nothing changes while all is well, and a NaN does no harm."""

from __future__ import annotations

import pytest

from tests.matrix import sampled
from tests.run.corpus import CASES, Case
from tests.run.running import Workplace

BY_ID = {case.id: case for case in CASES}
SURVIVORS = {name: case for name, case in BY_ID.items() if case.nan_at is not None}
USUAL = """
    plain scaler_clip accumulation lbfgs two_optimizers own_optimizer loader_workers in_thread
    endings-error tied_unused raw_tensors -m-bundle.train--m-12
"""
"""One of each kind of loop, of start and of ending: `pytest -m long` runs the other scripts."""
USUAL_WITH_NAN = ("plain", "scaler_clip", "lbfgs", "gan", "own_optimizer", "sparse", "hogwild-fork", "step_in_backward")


@pytest.mark.parametrize("case", sampled(BY_ID, USUAL))
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


@pytest.mark.parametrize("case", sampled(SURVIVORS, USUAL_WITH_NAN))
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


@pytest.mark.parametrize(
    "script", sampled(["accumulation", "compiled_after", "complex_model", "container", "policy"], ["accumulation"])
)
def test_a_nan_in_the_very_first_batch_does_no_harm(script: str, workplace: Workplace) -> None:
    assert workplace.plain(f"{script}.py", NAN_AT="0").finite is False
    guarded = workplace.guarded(f"{script}.py", NAN_AT="0")
    assert (guarded.code, guarded.finite) == (0, True), guarded


@pytest.mark.parametrize(
    "where",
    sampled(["forward", "shape", "backward", "build", "clip", "scaler", "closure", "thread"], ["forward", "thread"]),
)
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
