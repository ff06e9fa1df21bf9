"""What users read holds no feature numbers of the source documents: pages, help texts, findings, advice, presets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from trimtab.advice.guides import GUIDES
from trimtab.advice.recommendations import recommendations_for
from trimtab.cli.app import app
from trimtab.core.presets import PRESETS
from trimtab.core.registry import all_rules
from trimtab.doctor.examine import all_checks

ROOT = Path(__file__).parents[2]
FEATURE = re.compile(r"(?<![\w.:/#-])[A-E]\d{1,2}(?:\.\d+)?[b-d]?(?![\w-])")
"""Such as A7 or D15.3b; codes of rules have three digits and a longer word in front of them."""


def helps(command: Any) -> Iterator[str]:
    """The help texts of a command and of those below it."""
    yield command.help or ""
    for one in command.params:
        yield getattr(one, "help", None) or ""
    for below in getattr(command, "commands", {}).values():
        yield from helps(below)


def texts() -> Iterator[tuple[str, str]]:
    """Everything that users read and that is known before a run, each with where it stands."""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield page.relative_to(ROOT).as_posix(), page.read_text(encoding="utf-8")
    yield "help", "\n".join(helps(typer.main.get_command(app)))
    for one in (*all_rules(), *(type(check) for check in all_checks())):
        yield one.__name__, one.__doc__ or ""
    for rule in all_rules():
        yield f"advice on {rule.name}", "\n".join(f"{r.when}\n{r.text}" for r in recommendations_for(rule.name))
    for name, guide in GUIDES.items():
        points = [f"{point.do}\n{point.check}" for point in guide.points]
        yield f"guide {name}", "\n".join([guide.title, guide.signs, *points, *guide.beware])
    for preset in PRESETS:
        yield f"preset {preset.name}", "\n".join([preset.title, preset.source, *preset.notes])


def test_no_number_of_a_feature_is_shown_to_users() -> None:
    shown = {where: found for where, text in texts() if (found := FEATURE.findall(text))}
    shown.pop("docs/reference/documents.md")  # the page that says where each of them is
    assert shown == {}


@pytest.mark.parametrize("text", ["see A7", "(D15.3b)", "B31, C4"])
def test_a_number_of_a_feature_would_be_seen(text: str) -> None:
    assert FEATURE.search(text)
    assert not FEATURE.search("GRAD001, H200, lines:c4, A100, B^N, utf-8, E-5")
