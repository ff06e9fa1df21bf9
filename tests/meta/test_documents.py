"""The page about the source documents: every number is on it, and what it names is there."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "documents.md"
NUMBERS = {"A": 38, "B": 31, "C": 15, "D": 19, "E": 23}


def test_every_number_has_a_line() -> None:
    found: set[str] = set()
    for cell in re.findall(r"^\| ([A-E]\d[^|]*) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE):
        for part in cell.split(", "):
            first, _, last = part.partition(" to ")
            found |= {f"{first[0]}{n}" for n in range(int(first[1:]), int((last or first)[1:]) + 1)}
    wanted = {f"{letter}{n}" for letter, num in NUMBERS.items() for n in range(1, num + 1)}
    assert wanted - found == set()
    assert found - wanted == set()


def test_every_name_is_there() -> None:
    names = set(re.findall(r"`(trimtab(?:\.\w+)+)`", PAGE.read_text(encoding="utf-8"))) - {"trimtab.lightning"}
    assert len(names) > 30
    assert [name for name in sorted(names) if not _exists(name)] == []


def _exists(name: str) -> bool:
    module, _, attribute = name.rpartition(".")
    try:
        return hasattr(import_module(module), attribute) or import_module(name) is not None
    except ImportError:
        return False
