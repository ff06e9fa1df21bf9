"""The debugging guides: complete, in the numbers of the documents, and honest about what trimtab can show."""

from __future__ import annotations

import doctest
import re

import pytest
import typer

from trimtab.advice import guides, recommendations
from trimtab.advice.guides import GUIDES, Guide, find_guide
from trimtab.advice.recommendations import TABLE
from trimtab.cli.app import app
from trimtab.core.errors import InputError
from trimtab.core.registry import all_rules

RULES = {rule.name for rule in all_rules()}


def texts(guide: Guide) -> str:
    points = (f"{p.do} {p.check}" for p in guide.points)
    return " ".join((guide.title, guide.signs, *points, *guide.beware))


def sources(problem: str) -> list[str]:
    return [p.source for p in GUIDES[problem].points]


def test_a31_the_five_solutions_in_their_order() -> None:
    assert [s for s in sources("nan") if s.startswith("A31")] == [f"A31.{i}" for i in range(1, 6)]
    assert "cannot repair a NaN" in texts(GUIDES["nan"])  # what is wrong about the fourth


def test_a32_the_five_solutions_and_a_warning_about_the_smallest_norm() -> None:
    assert {s for s in sources("plateau") if s.startswith("A32")} == {f"A32.{i}" for i in range(1, 6)}
    assert "smallest gradient norm alone misleads" in texts(GUIDES["plateau"])
    assert "1e-7" in texts(GUIDES["plateau"])


def test_a33_the_five_solutions_with_their_numbers_and_limits() -> None:
    assert [s for s in sources("explosion") if s.startswith("A33")] == [f"A33.{i}" for i in range(1, 6)]
    text = texts(GUIDES["explosion"])
    for needed in ("0.3", "tenfold", "above 100", "not a general remedy", "not always calmer", "LR x limit / norm"):
        assert needed in text


def test_a34_the_four_solutions() -> None:
    assert [s for s in sources("slow") if s.startswith("A34")] == [f"A34.{i}" for i in range(1, 5)]
    assert "log_frequency=1000" in texts(GUIDES["slow"])
    assert "set_detect_anomaly" in texts(GUIDES["slow"])


def test_a35_the_ten_points_in_their_order() -> None:
    assert sources("checklist") == [f"A35.{i}" for i in range(1, 11)]
    text = texts(GUIDES["checklist"])
    for needed in ("0.1 and 10", "ten times smaller", "1e-8", "above 1000", "8 samples", "14 and 100", "500"):
        assert needed in text


@pytest.mark.parametrize("guide", GUIDES.values(), ids=lambda g: g.problem)
def test_every_point_can_be_checked_with_what_exists(guide: Guide) -> None:
    commands = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    text = texts(guide)
    assert set(re.findall(r"`trimtab (\w+)", text)) <= commands
    assert set(guide.findings) <= RULES
    families = {word.split("-")[0] for word in RULES}
    worded = {"one-sided", "norm-based", "ten-point"}
    names = {w for w in re.findall(r"\b[a-z]+(?:-[a-z]+)+\b", text) if w.split("-")[0] in families} - worded
    assert names <= RULES, names - RULES
    known = {number for one in TABLE for number in one.numbers} | {*(f"A34.{i}" for i in range(1, 5)), "E20.4"}
    assert {p.source for p in guide.points} <= known
    assert all(p.do.endswith((".", "?")) and p.check.endswith((".", "?")) for p in guide.points)


def test_guides_are_found_in_any_case_and_the_others_are_listed() -> None:
    assert find_guide(" NaN ") is GUIDES["nan"]
    with pytest.raises(InputError, match="'fire'; expected one of nan, plateau, explosion, slow, checklist"):
        find_guide("fire")


@pytest.mark.parametrize("module", [guides, recommendations], ids=lambda m: m.__name__)
def test_examples_run(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0
