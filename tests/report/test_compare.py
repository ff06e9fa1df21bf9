"""Two runs side by side, and charts as pictures."""

from __future__ import annotations

import io
import json
import math
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.report.conftest import WriteRun
from trimtab.core.errors import InputError, MissingPackageError
from trimtab.record.reader import read_run
from trimtab.report.compare import compare_runs
from trimtab.report.compare_view import comparison_html, render_comparison, write_comparison
from trimtab.report.drawing import Line, Picture, shapes, ticks, to_png, to_svg
from trimtab.report.text import SafeConsole

EVIL = "</style><script>alert(1)</script>\x1b[2J"
DECAY = [math.exp(-i / 20) for i in range(80)]


def text_of(found: object) -> str:
    out = io.StringIO()
    SafeConsole(width=100, file=out).print(render_comparison(found, 100))  # type: ignore[arg-type]
    return out.getvalue()


def test_what_differs_is_said(write_run: WriteRun) -> None:
    a = read_run(write_run(DECAY, name="a", settings={"mode": "act"}))
    worse = [*(v + 0.5 for v in DECAY[:50]), math.nan, *(v + 0.5 for v in DECAY[51:])]
    b = read_run(write_run(worse, name="b", settings={"mode": "observe", "full_every": 7}))
    found = compare_runs(a, b)
    assert "At step 79, the last that both reached, a has the lower loss: 0.0241 against 0.524." in found.verdict
    assert {d.name: (d.a, d.b) for d in found.settings} == {"mode": ("act", "observe"), "full_every": ("50", "7")}
    assert found.same_until == 0
    assert {f.name for f in found.found if f.first_a is None} == {f.name for f in found.found} != set()
    assert next(m for m in found.measures if m.name == "steps").b == 80
    text = text_of(found)
    assert "full_every" in text
    assert "first at step" in text or "step 50" in text


def test_the_same_run_twice(write_run: WriteRun) -> None:
    a, b = (read_run(write_run(DECAY, name=name)) for name in "ab")
    found = compare_runs(a, b)
    assert found.same_until is None
    assert found.settings == found.facts == ()
    assert "alike" in found.verdict
    assert "the same at every step" in text_of(found)


def test_where_they_part(write_run: WriteRun) -> None:
    a = read_run(write_run(DECAY, name="a"))
    b = read_run(write_run([*DECAY[:37], *(2 * v for v in DECAY[37:60])], name="b"))
    assert compare_runs(a, b).same_until == 37
    assert compare_runs(a, b).common == 59


def test_aligned_by_epoch(write_run: WriteRun) -> None:
    a = read_run(write_run(DECAY, name="a"))
    b = read_run(write_run(DECAY[::2], name="b"))
    found = compare_runs(a, b, by="epoch", epoch_steps=(20, 10))
    assert found.axis == "epoch"
    assert found.common == pytest.approx(3.9)
    assert next(m for m in found.measures if m.name.startswith("loss at epoch")).a == pytest.approx(0.024, rel=0.3)
    with pytest.raises(InputError, match="--epoch-steps"):
        compare_runs(a, b, by="epoch")
    with pytest.raises(InputError, match="'day'"):
        compare_runs(a, b, by="day")


def test_epochs_that_are_on_record(write_run: WriteRun) -> None:
    folders = [write_run(DECAY, name=name) for name in "ab"]
    for folder, length in zip(folders, (20, 40), strict=True):
        lines = []
        for line in (folder / "run.jsonl").read_text().splitlines():
            data = json.loads(line)
            if data["t"] == "sample":
                data["scalars"]["epoch"] = data["step"] // length
            lines.append(json.dumps(data))
        (folder / "run.jsonl").write_text("\n".join(lines) + "\n")
    found = compare_runs(*map(read_run, folders), by="epoch")
    assert found.common == pytest.approx(79 / 40)
    assert found.overlays[0].a[0][30] == pytest.approx(1.5)


def test_a_run_without_a_loss_or_with_nothing(write_run: WriteRun) -> None:
    a, empty = read_run(write_run(DECAY, name="a")), read_run(write_run([], name="b"))
    found = compare_runs(a, empty)
    assert "no loss on record" in found.verdict
    assert "not recorded" in text_of(found)
    assert "<svg" in comparison_html(found)


def test_numbers_near_the_largest_float(write_run: WriteRun) -> None:
    a = read_run(write_run([1e308, -1e308, 1.7e308, 0.0, 5e-324], [1e30] * 5, name="a"))
    found = compare_runs(a, a)
    assert "alike" in found.verdict
    assert "<svg" in comparison_html(found)
    assert text_of(found)


def test_names_cannot_do_harm_on_the_page(write_run: WriteRun) -> None:
    a, b = (write_run([*DECAY, math.nan], name=name) for name in "ab")
    lines = (b / "run.jsonl").read_text().splitlines()
    first = json.loads(lines[0]) | {"model": EVIL, "script": EVIL, "config": {EVIL: EVIL, "clip": {"norm": None}}}
    (b / "run.jsonl").write_text("\n".join([json.dumps(first), *lines[1:]]) + "\n")
    found = compare_runs(read_run(a), read_run(b))
    page = comparison_html(found)
    assert "<script" not in page
    assert "\x1b" not in page
    assert "\x1b" not in text_of(found)
    path = write_comparison(found, a.parent / "deep" / "c.html")
    assert path.read_text(encoding="utf-8") == page


@given(
    values=st.lists(st.floats(allow_nan=True, allow_infinity=True, width=64), max_size=40),
    log=st.sampled_from([None, True, False]),
    points=st.booleans(),
    title=st.text(max_size=20),
)
def test_any_values_make_a_picture(values: list[float], log: bool | None, points: bool, title: str) -> None:
    line = Line(name=title, x=np.arange(len(values), dtype=float), values=np.array(values, float), as_points=points)
    picture = Picture(title=title, lines=(line,), log=log)
    for shape in shapes(picture):
        assert all(math.isfinite(v) for point in shape.points for v in point)
    ElementTree.fromstring(to_svg([picture]))


@pytest.mark.parametrize("num", [1, 2, 1000, 100_000])
def test_no_extreme_is_hidden(num: int) -> None:
    values = np.ones(num)
    values[num // 3] = 1e9
    picture = Picture(title="x", lines=(Line(name="", x=np.arange(num, dtype=float), values=values),))
    drawn = [y for s in shapes(picture, 800, 280) if s.kind != "text" for _, y in s.points]
    assert min(drawn) < 60
    assert len(to_svg([picture])) < 200_000


@given(low=st.floats(1e-300, 1e300), factor=st.floats(1.0001, 1e12), log=st.booleans())
def test_ticks_lie_within(low: float, factor: float, log: bool) -> None:
    high = min(low * factor, 1e305)
    found = ticks(low, high, log)
    assert 1 <= len(found) <= 16
    near = 1e-6 * high
    assert all(low - near <= v <= high + near for v in found)


def test_a_png_is_one(tmp_path: Path) -> None:
    line = Line(name="loss", x=np.arange(50.0), values=np.linspace(3, 1, 50))
    if find_spec("PIL") is None:
        with pytest.raises(MissingPackageError, match="pip install pillow"):
            to_png([Picture(title="loss", lines=(line,))])
        return
    assert to_png([Picture(title="loss é", lines=(line,))]).startswith(b"\x89PNG")
