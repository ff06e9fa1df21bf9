"""Packed states: the same to the bit, through JSON too, and smaller."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest

from trimtab.core.stats.packed import MIN_LENGTH, packed, unpacked

CASES: dict[str, Any] = {
    "doubles": [i / 7 for i in range(40)],
    "singles": [struct.unpack("f", struct.pack("f", i / 7))[0] for i in range(40)],
    "odd ones": [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, *([1.0] * 20)],
    "whole numbers": list(range(40)),
    "mixed": [1, 2.0] * 20,
    "short": [0.5] * (MIN_LENGTH - 1),
    "rows": [{"a": i / 3, "b": float(i)} if i % 3 else {"b": 1.0} for i in range(40)],
    "rows of other things": [{"a": i} for i in range(40)],
    "empty rows": [{}] * 40,
    "nested": {"x": [[i / 9 for i in range(20)], {"y": [0.1] * 30}], "n": None, "s": "text", "e": []},
}


def told(tree: Any) -> str:
    return repr(tree)  # tells -0.0 from 0.0, 1 from 1.0, and NaN is itself


@pytest.mark.parametrize("case", CASES)
def test_it_comes_back_to_the_bit_and_through_json(case: str) -> None:
    tree = CASES[case]
    assert told(unpacked(packed(tree))) == told(tree)
    assert told(unpacked(json.loads(json.dumps(packed(tree))))) == told(tree)
    assert told(unpacked(tree)) == told(tree)  # an earlier state that was not packed


@pytest.mark.parametrize(("case", "most"), [("doubles", 0.65), ("singles", 0.4), ("rows", 0.7)])
def test_it_is_smaller(case: str, most: float) -> None:
    assert len(json.dumps(packed(CASES[case]))) < most * len(json.dumps(CASES[case]))
