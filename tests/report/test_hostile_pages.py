"""Runs that are damaged, strange or made to harm: a correct page, or one clear message."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from tests.report.conftest import WriteRun
from trimtab.core.errors import RecordError
from trimtab.record.reader import read_run
from trimtab.report.html import to_html

SAMPLE = b'{"t":"sample","seq":%d,"step":%d,"branch":0,"layout":%s,"phase":"train","tab":0,"scalars":{%s}}\n'


def damaged(folder: Path, *lines: bytes) -> str:
    with (folder / "run.jsonl").open("ab") as file:
        file.writelines(lines)
    return to_html(read_run(folder))


def layout_of(folder: Path) -> bytes:
    for line in (folder / "run.jsonl").read_bytes().splitlines():
        if line.startswith(b'{"t":"layout"'):
            return b"%d" % json.loads(line)["seq"]
    raise AssertionError("no layout")


def test_torn_lines_and_wrong_types_cost_only_themselves(write_run: WriteRun) -> None:
    folder = write_run([1.0 - s / 100 for s in range(40)])
    layout = layout_of(folder)
    page = damaged(
        folder,
        SAMPLE % (9001, 40, layout, b'"loss":"x"'),
        SAMPLE % (9002, 40, layout, b'"loss":[1]'),
        SAMPLE % (9003, 40, b'"first"', b'"loss":1.0'),
        SAMPLE % (9004, -5, layout, b'"loss":1.0'),
        b'{"t":"verdict","seq":9005,"step":"late","seen_at":0,"findings":[],"optimizer":"","phase":"train"}\n',
        b'{"t":"close","seq":9006,"steps":[],"rejected":0,"num_findings":0,"reason":"closed","dropped":{}}\n',
        b"\xff\xfe\x00 not text\n",
        b'{"t":"sample","seq":9007,"st',
    )
    assert "What is wrong with the record" in page
    assert "line 4" in page
    assert "is damaged and was skipped" in page
    assert "incomplete" in page
    assert "40</dd>" in page  # the steps that can be read


def test_numbers_beyond_all_measure_are_drawn(write_run: WriteRun) -> None:
    folder = write_run([1.0] * 20)
    layout = layout_of(folder)
    values = [b"1e308", b"-1e308", b"5e-324", b"0.0", b"-0.0", b"1e400"]
    lines = [SAMPLE % (9100 + i, 20 + i, layout, b'"loss":%s,"grad_norm":%s' % (v, v)) for i, v in enumerate(values)]
    far = SAMPLE % (9200, 2**62, layout, b'"loss":1.0')
    page = damaged(folder, *lines, far)
    assert "<canvas" in page


def test_a_record_of_a_newer_format_says_to_upgrade(write_run: WriteRun) -> None:
    folder = write_run([1.0] * 5)
    path = folder / "run.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"version":[1,', b'"version":[9,'))
    with pytest.raises(RecordError, match="upgrade trimtab"):
        read_run(folder)


def test_ten_gigabytes_of_nothing_are_not_read(write_run: WriteRun) -> None:
    folder = write_run([1.0] * 5)
    os.truncate(folder / "tables.f32", 10 * 10**9)
    page = to_html(read_run(folder))
    assert "tables.f32 cannot be read" in page
    assert "<canvas" in page


def test_every_line_with_other_names_is_still_a_page(write_run: WriteRun) -> None:
    folder = write_run([1.0] * 5)
    layout = layout_of(folder)
    lines = [SAMPLE % (9300 + i, 5 + i, layout, b'"loss":1.0,"own %d":2.0' % i) for i in range(500)]
    page = damaged(folder, *lines)
    assert "505" in page


def test_an_incident_that_never_ends_is_told_once(write_run: WriteRun) -> None:
    page = to_html(read_run(write_run([1.0] * 20 + [math.nan] * 400)))
    assert page.count("<article") == 1
    assert "Loss is NaN or Inf" in page
    assert len(page) < 500_000
