"""Every feature number of the source documents that is built has a test that carries it in its name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BUILT = [
    "A1",
    "A2",
    "A3",
    "A4",
    "A5",
    "A6",
    "A7",
    "A8",
    "A9",
    "A10",
    "A11",
    "A12",
    "A13",
    "A14",
    "A15",
    "A16",
    "A17",
    "A18",
    "A19",
    "A20",
    "A21",
    "A22",
    "A23",
    "A24",
    "A26",
    "A27",
    "A29",
    "A30",
    "A31",
    "A32",
    "A33",
    "A34",
    "A35",
    "A37",
    "B5",
    "B7",
    "B8",
    "B9",
    "B10",
    "B11",
    "B12",
    "B13",
    "B14",
    "B16",
    "B17",
    "B18",
    "B19",
    "B20",
    "B24",
    "B25",
    "B26",
    "B29",
    "C1",
    "C2",
    "C3",
    "C4",
    "C5",
    "C6",
    "C7",
    "C8",
    "C9",
    "C10",
    "C11",
    "C12",
    "C13",
    "C14",
    "C15",
    "D1",
    "D2",
    "D3",
    "D4",
    "D5",
    "D6",
    "D7",
    "D8",
    "D9",
    "D10",
    "D11",
    "D12",
    "D13",
    "D14",
    "D15",
    "D16",
    "D18",
    "E1",
    "E2",
    "E3",
    "E4",
    "E5",
    "E6",
    "E7",
    "E8",
    "E10",
    "E12",
    "E13",
    "E14",
    "E15",
    "E16",
    "E17",
    "E18",
    "E19",
    "E20",
    "E23",
]


def all_names() -> list[str]:
    found: list[str] = []
    for path in TESTS.rglob("test_*.py"):
        found += re.findall(r"def (test_\w+)", path.read_text(encoding="utf-8"))
    return found


NAMES = all_names()


@pytest.mark.parametrize("number", BUILT)
def test_has_a_test_of_its_own(number: str) -> None:
    assert [name for name in NAMES if re.search(rf"_{number.lower()}(_|$)", name)]
