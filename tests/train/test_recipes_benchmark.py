"""The script behind the recipes' numbers: it judges right, keeps what it measured, and nothing missing passes."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SEEDS = (42, 1000)


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, Any]]:
    folder = str(Path(__file__).parents[2] / "benchmarks")
    sys.path.insert(0, folder)
    import recipes
    import recipes_claims
    import recipes_jobs
    import recipes_page

    yield {"main": recipes, "claims": recipes_claims, "jobs": recipes_jobs, "page": recipes_page}
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def sections(bench: dict[str, Any]) -> dict[str, Any]:
    return bench["main"].sections(bench["main"].SECTIONS, SEEDS, quick=False)


def test_a_claim_holds_for_every_seed_or_not_at_all(bench: dict[str, Any]) -> None:
    claims = bench["claims"]
    good = claims.claim("score", {"42": 0.9, "1000": 0.86}, claims.at_least(0.85))
    bad = claims.claim("score", {"42": 0.9, "1000": 0.84}, claims.at_least(0.85))
    assert good.line("pairs") == "ok    pairs: score: 0.9 (42), 0.86 (1000); expected at least 0.85"
    assert bad.verdict == "MISS"
    for value in (math.nan, claims.NOT_RUN):
        assert not claims.claim("score", {"42": value}, claims.at_least(0.85)).holds
        assert not claims.claim("score", {"42": value}, claims.below(0.85)).holds
    assert claims.claim("told only", {"42": math.nan}).verdict == "–"


def test_every_recipe_has_its_section_and_jobs_can_be_kept(bench: dict[str, Any], sections: dict[str, Any]) -> None:
    assert set(bench["jobs"].known_recipes()) <= set(sections)
    for name, section in sections.items():
        names = [job.name for job in section.jobs]
        assert len(set(names)) == len(names), name
        assert all(job.kind in bench["jobs"].KINDS and job.section == name for job in section.jobs)
        json.dumps([dict(job.spec) for job in section.jobs])


def test_what_was_not_run_or_failed_never_passes(bench: dict[str, Any], sections: dict[str, Any]) -> None:
    for section in sections.values():
        broken = {job.name: {"error": "boom"} for job in section.jobs}
        for found in ({}, broken):
            judged = section.judge(bench["claims"].Found(found))
            assert any(claim.test is not None for claim in judged.claims)
            assert [claim.what for claim in judged.claims if claim.test is not None and claim.holds] == []


def test_what_was_measured_is_kept_and_asked_for_again_when_anything_changed(
    bench: dict[str, Any], tmp_path: Path
) -> None:
    cache = bench["page"].Cache(tmp_path)
    cache.put("charlm", "clean/42", {"seed": 42}, {"score": math.nan}, "one")
    cache.put("charlm", "broken/42", {}, {"error": "boom"}, "one")
    again = bench["page"].Cache(tmp_path)
    assert math.isnan(again.values("charlm")["clean/42"]["score"])
    assert again.has("charlm", "clean/42", {"seed": 42}, "one")
    assert again.has("charlm", "clean/42", {"seed": 42}, None)
    assert not again.has("charlm", "clean/42", {"seed": 42}, "two"), "other sources"
    assert not again.has("charlm", "clean/42", {"seed": 43}, "one"), "asked for differently"
    assert not again.has("charlm", "broken/42", {}, "one"), "an error is no result"


def test_the_page_says_how_many_hold_and_where_it_was_made(
    bench: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    cache = bench["page"].Cache(tmp_path)
    cache.put("charlm", "counts", {}, {"letters": 3.25, "pairs": 1.6}, "one")
    judged = {name: section.judge(bench["claims"].Found(cache.values(name))) for name, section in sections.items()}
    text = bench["page"].page(judged, cache, SEEDS, "python benchmarks/recipes.py")
    assert "`python benchmarks/recipes.py`: 0 of " in text
    assert "| charlm | " in text
    assert text.count("\n## ") == len(judged) + 1
    rows = [line.count(" | ") for line in text.splitlines() if line.startswith("| share of the first 100")]
    assert rows == [len(SEEDS) + 2]


def test_the_short_table_goes_between_the_marks_and_nothing_else_changes(
    bench: dict[str, Any], sections: dict[str, Any], tmp_path: Path
) -> None:
    page, readme = bench["page"], tmp_path / "README.md"
    judged = {name: section.judge(bench["claims"].Found({})) for name, section in sections.items()}
    table = page.summary(judged, Path("results.md"))
    rows = [line for line in table.splitlines() if line.startswith("| ")]
    assert {line.split(" | ")[0] for line in rows[2:]} == {f"| {name}" for name in bench["main"].RECIPES}
    assert len({line.count(" | ") for line in rows}) == 1
    assert "[`results.md`](results.md)" in table
    readme.write_text(f"before\n{page.BEGIN}\nold\n{page.END}\nafter\n")
    page.put_between_marks(readme, table)
    assert readme.read_text() == f"before\n{page.BEGIN}\n{table}\n{page.END}\nafter\n"
    readme.write_text("no marks")
    with pytest.raises(ValueError, match="has no"):
        page.put_between_marks(readme, table)


def test_one_broken_job_costs_one_line(bench: dict[str, Any]) -> None:
    job = bench["jobs"].Job(section="charlm", name="x", kind="train", spec={"recipe": "nothing", "seed": 1})
    assert "there is no recipe 'nothing'" in bench["main"].safely(job)["error"]


def test_the_arms_of_an_overhead_take_turns_and_each_is_timed(bench: dict[str, Any]) -> None:
    import recipes_overhead

    out = recipes_overhead.measure("tabular", 3, 2, {})
    assert (out["rounds"], out["block"]) == (3, 2)
    assert all(out[arm]["processor_ms"] > 0 for arm in recipes_overhead.ARMS)
    assert set(out[recipes_overhead.GUARDED]) == {"wall_ms", "processor_ms", "wall_adds", "processor_adds"}
    with pytest.raises(RuntimeError, match="an arm of tabular ended early"):
        recipes_overhead.measure("tabular", 3, 20, {"epochs": 1})
