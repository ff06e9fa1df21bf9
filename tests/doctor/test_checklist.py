"""The list itself: every check is documented, has a name of its own, and stands where it was announced."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tests.doctor.kit import alarms, by_hand, line, look, sound
from tests.doctor.test_first_steps import no_zero
from trimtab.core.errors import ConfigError
from trimtab.core.registry import all_rules
from trimtab.doctor.checklist import Line, Status
from trimtab.doctor.checks import BUILTIN
from trimtab.doctor.examine import all_checks, explained, find_check, select_checks

SECTIONS = ("## What it means", "## How it is checked", "## What to try")


@pytest.mark.parametrize("check", BUILTIN, ids=lambda c: c.name)
def test_e20_every_check_is_documented_and_named_like_its_file(check):
    text = inspect.getdoc(check) or ""
    for section in SECTIONS:
        assert section in text
    assert re.search(r"^1\. ", text, flags=re.MULTILINE)
    assert Path(inspect.getfile(check)).stem == check.name.replace("-", "_")
    assert re.fullmatch(r"[A-Z]+\d{3}", check.code)


def test_codes_and_names_are_unique_and_those_of_rules_are_kept():
    assert len({c.name for c in BUILTIN}) == len(BUILTIN)
    assert len({c.code for c in BUILTIN}) == len(BUILTIN)
    rules = {r.name: r.code for r in all_rules()}
    codes = set(rules.values())
    for check in BUILTIN:
        assert rules.get(check.name, check.code) == check.code
        assert check.name in rules or check.code not in codes


def test_consequences_that_a_check_names_exist():
    known = {c.name for c in BUILTIN} | {r.name for r in all_rules()} | {"*"}
    for check in BUILTIN:
        assert set(check.causes) <= known, check.name


def test_selection_by_code_family_and_name():
    assert {c.code.rstrip("0123456789") for c in select_checks(("OPT",), ())} == {"OPT"}
    assert [c.name for c in select_checks(("eval_mode", "LOSS001"), ())] == ["eval-mode", "nonfinite-loss"]
    assert len(select_checks((), ("WIRE",))) < len(all_checks())
    with pytest.raises(ConfigError, match="did you mean 'gradcheck'"):
        select_checks(("grad-check",), ())
    assert find_check("no-such-thing") is None


def made(name: str, status: Status) -> Line:
    return Line(code="X", name=name, title="", status=status, evidence="seen", cause="because")


def test_a_cause_speaks_for_its_consequences():
    lines = explained(
        [made("no-grad", Status.FAIL), made("missing-gradient", Status.FAIL), made("eval-mode", Status.WARN)]
    )
    assert [one.status for one in lines] == [Status.FAIL, Status.NA, Status.NA]
    assert lines[1].follows == "no-grad"
    assert "follows from no-grad" in lines[1].evidence
    apart = explained([made("untied-weights", Status.FAIL), made("double-step", Status.FAIL)])
    assert [one.status for one in apart] == [Status.FAIL, Status.FAIL]


def test_every_line_that_is_no_alarm_says_why():
    report = look(sound())
    assert all(one.evidence for one in report.lines)
    assert {one.name for one in report.lines} == {c.name for c in BUILTIN}
    assert line(report, "loader-settings").status is Status.NA  # never "pass" on a CPU
    assert line(report, "memory-peak").status is Status.NA


def test_a_check_that_breaks_says_nothing_about_the_training(monkeypatch):
    from trimtab.doctor.checks.eval_mode import EvalMode

    def broken(self, probe):
        raise RuntimeError("oops")
        yield

    monkeypatch.setattr(EvalMode, "run", broken)
    report = look(by_hand(no_zero))
    assert alarms(report) == ["stale-gradient"]
    assert "oops" in line(report, "eval-mode").evidence
