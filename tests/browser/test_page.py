"""The page as people use it: pointing, dragging, typing; and that it never speaks to anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import BAD_STEP, SPIKE_STEP, Open, loss_at
from trimtab.record.writer import RunWriter

LEFT, RIGHT = 236, 18  # as in charts.js
COUNT = """(canvas, [x, y, w, h, name]) => {
  const ratio = devicePixelRatio, hex = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const want = hex.match(/[0-9a-f]{2}/gi).map((part) => parseInt(part, 16));
  const {data} = canvas.getContext("2d").getImageData(x * ratio, y * ratio, w * ratio, h * ratio);
  let found = 0;
  for (let i = 0; i < data.length; i += 4) {
    found += want.every((c, k) => Math.abs(c - data[i + k]) < 24) && data[i + 3] > 200;
  }
  return found;
}"""


def x_of(canvas: Any, step: int, first: float = -0.5, last: float = 299.5) -> float:
    width = canvas.bounding_box()["width"]
    return float(LEFT + (step - first) / (last - first) * (width - LEFT - RIGHT))


def count(canvas: Any, x: float, y: float, w: float, h: float, name: str) -> int:
    """How many pixels of a canvas have a colour of the theme."""
    return int(canvas.evaluate(COUNT, [round(x), round(y), round(w), round(h), name]))


def hover(page: Any, canvas: Any, x: float, y: float = 40) -> None:
    canvas.scroll_into_view_if_needed()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + x, box["y"] + y)


def drag(page: Any, canvas: Any, start: float, end: float) -> None:
    hover(page, canvas, start)
    box = canvas.bounding_box()
    page.mouse.down()
    page.mouse.move(box["x"] + (start + end) / 2, box["y"] + 45)
    page.mouse.move(box["x"] + end, box["y"] + 50)
    page.mouse.up()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["small", "large"])
def test_no_request_and_no_complaint(open_page: Open, request: pytest.FixtureRequest, which: str, scheme: str) -> None:
    path = request.getfixturevalue(which)
    seen = open_page(path, color_scheme=scheme)
    canvas = seen.page.locator(".panel canvas").first
    hover(seen.page, canvas, 600)
    drag(seen.page, canvas, 500, 800)
    seen.page.keyboard.press("Escape")
    seen.page.set_viewport_size({"width": 500, "height": 700})
    seen.page.wait_for_timeout(100)
    assert seen.requests == [path.as_uri()]
    assert seen.complaints == []
    assert seen.page.locator("img, iframe, link").count() == 0


def test_an_empty_run_and_a_single_step_are_drawn_without_complaint(open_page: Open, tmp_path: Path) -> None:
    from tests.browser.conftest import write_page
    from trimtab.core.types import Closing
    from trimtab.record.reader import read_run
    from trimtab.report.html import write_html

    writer = RunWriter(tmp_path / "empty")
    writer.write(Closing(steps={"": 0}, rejected=0, findings=0, reason="closed"))
    writer.close()
    for path in (write_html(read_run(tmp_path / "empty")), write_page(tmp_path / "one", num_steps=1)):
        assert open_page(path).complaints == []


def test_the_cursor_reads_the_same_step_in_every_chart(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    canvas = page.locator(".panel canvas").first
    for step in (20, 200, SPIKE_STEP):
        hover(page, canvas, x_of(canvas, step))
        assert page.locator(".at").inner_text() == f"Step {step}"
        assert float(page.locator(".panel .legend .value").first.inner_text()) == pytest.approx(loss_at(step), rel=0.01)
        assert page.locator(".panel").nth(1).locator(".legend .value").first.inner_text() == "2"
        line = page.locator(".cursor").bounding_box()
        assert line["x"] == pytest.approx(canvas.bounding_box()["x"] + x_of(canvas, step), abs=1.5)
    hover(page, canvas, x_of(canvas, BAD_STEP))
    assert page.locator(".panel .legend .value").first.inner_text() == "NaN"
    page.mouse.move(5, 5)
    assert page.locator(".cursor").is_hidden()


def test_values_that_are_not_finite_are_crosses_at_the_top_edge(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    for number in (0, 1):
        canvas = page.locator(".panel canvas").nth(number)
        x = x_of(canvas, BAD_STEP)
        assert count(canvas, x - 6, 0, 12, 13, "--error") > 10
        assert count(canvas, x_of(canvas, 30) - 6, 0, 12, 13, "--error") == 0
    assert "NaN or Inf" in page.locator(".panel .legend").first.inner_text()


def test_a_spike_of_one_step_among_thousands_is_drawn(open_page: Open, large: Path) -> None:
    page = open_page(large).page
    panel = page.locator(".panel").first
    canvas = panel.locator("canvas")
    x = x_of(canvas, SPIKE_STEP, last=4999.5)
    assert count(canvas, x - 3, 14, 6, 40, "--s1") > 20
    assert count(canvas, x + 60, 14, 6, 40, "--s1") == 0


def test_the_heat_map_shows_what_is_no_number(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    canvas = page.locator(".spacer canvas")
    height = (canvas.bounding_box()["height"] - 22) / 4
    bad = x_of(canvas, BAD_STEP)
    assert count(canvas, bad - 3, 1, 6, height - 2, "--alarm") > 20
    assert count(canvas, bad - 3, height + 1, 6, height - 2, "--alarm") == 0
    assert count(canvas, x_of(canvas, 50), 1, 50, height - 2, "--alarm") == 0
    frozen = count(canvas, x_of(canvas, 20), 3 * height, 100, height, "--none-ink")
    absent = count(canvas, x_of(canvas, 20), 2 * height, 100, height, "--none-ink")
    zero = count(canvas, x_of(canvas, 220), 2 * height, 100, height, "--ink")
    assert min(frozen, absent, zero) > 20
    for step, row, words in (
        (BAD_STEP, 0, "NaN"),
        (50, 2, "no gradient"),
        (250, 2, "exactly zero"),
        (50, 3, "frozen"),
        (50, 0, "times its usual"),
    ):
        hover(page, canvas, x_of(canvas, step), (row + 0.5) * height)
        text = page.locator(".tip").inner_text()
        assert words in text
        assert f"step {step}" in text
    assert {"NaN or Inf", "exactly zero", "no gradient", "frozen"} <= set(page.locator(".key li").all_inner_texts())


def test_drag_zooms_every_chart_and_escape_goes_back(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    canvas = page.locator(".panel canvas").first
    drag(page, canvas, x_of(canvas, 100), x_of(canvas, 200))
    assert page.locator(".reset").is_visible()
    for other in (canvas, page.locator(".panel canvas").nth(2)):
        hover(page, other, LEFT + 1)
        assert page.locator(".at").inner_text() == "Step 100"
    heat = page.locator(".spacer canvas")
    hover(page, heat, heat.bounding_box()["width"] - RIGHT - 2, 5)
    assert "step 200" in page.locator(".tip").inner_text()
    assert page.locator(".flag.warn").count() == 0  # its step is outside
    page.keyboard.press("Escape")
    assert page.locator(".reset").is_hidden()
    drag(page, canvas, x_of(canvas, 100), x_of(canvas, 200))
    canvas.dblclick(position={"x": 600, "y": 60})
    assert page.locator(".reset").is_hidden()
    drag(page, canvas, x_of(canvas, 100), x_of(canvas, 200))
    page.locator(".reset").click()
    hover(page, canvas, LEFT + 1)
    assert page.locator(".at").inner_text() == "Step 0"


def test_everything_can_be_reached_by_keyboard(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    canvas = page.locator(".panel canvas").first
    canvas.focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert page.locator(".at").inner_text() == "Step 3"
    assert "Loss: training 1" in page.locator(".spoken").inner_text()
    page.keyboard.press("+")
    assert page.locator(".reset").is_visible()
    page.keyboard.press("Escape")
    page.locator(".spacer canvas").focus()
    page.keyboard.press("ArrowDown")
    assert "a.b" in page.locator(".spoken").inner_text()
    page.locator(".flag.error").focus()
    assert f"at {BAD_STEP}" in page.locator(".tip").inner_text()
    assert page.locator(".flag.error").get_attribute("aria-label")


def test_marks_tell_what_was_found_and_done(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    canvas = page.locator(".panel canvas").first
    hover(page, canvas, x_of(canvas, BAD_STEP))
    assert "Incident 1" in page.locator(".tip").inner_text()
    page.locator(".flag.deed").hover()
    assert "multiply the learning rate by 0.5" in page.locator(".tip").inner_text()
    page.locator(".flag.error").click()
    assert page.url.endswith("#incident-1")
    assert page.locator("#incident-1").is_visible()


def test_scales_and_rows_can_be_chosen(open_page: Open, small: Path, large: Path) -> None:
    page = open_page(small).page
    canvas, button = page.locator(".panel canvas").first, page.locator(".panel .scale").first
    before = canvas.evaluate("c => c.toDataURL()")
    assert button.inner_text() == "linear scale"
    button.click()
    assert button.inner_text() == "log scale"
    assert canvas.evaluate("c => c.toDataURL()") != before
    assert page.locator(".choice.rows").is_hidden()
    page = open_page(large).page
    heat = page.locator(".spacer canvas")
    hover(page, heat, 700, 5)
    assert "(4 parameters)" in page.locator(".tip").inner_text()
    before = heat.evaluate("c => c.toDataURL()")
    page.locator("[data-mode=absolute]").click()
    assert heat.evaluate("c => c.toDataURL()") != before
    page.locator("[data-rows=all]").click()
    page.locator(".scroller").evaluate("e => { e.scrollTop = 1e6; }")
    page.wait_for_timeout(100)
    box = heat.bounding_box()
    hover(page, heat, 700, box["height"] - 22 - 5)
    assert "layers.29.o" in page.locator(".tip").inner_text()


def test_crisp_on_fine_screens_and_after_a_resize(open_page: Open, small: Path) -> None:
    page = open_page(small, device_scale_factor=2).page
    sizes = "() => [...document.querySelectorAll('.panel canvas')].map(c => [c.width, 2 * c.clientWidth])"
    for width in (1280, 900, 420):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)
        for drawn, shown in page.evaluate(sizes):
            assert drawn == shown
        assert page.evaluate("document.documentElement.scrollWidth") <= width
