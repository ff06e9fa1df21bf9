"""The page as people use it: pointing, dragging, typing; and that it never speaks to anybody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.conftest import BAD_STEP, SPIKE_STEP, Open, loss_at, write_page
from trimtab.core.types import NORM_COLUMNS, Closing, Kind, Layout, Sample
from trimtab.record.reader import read_run
from trimtab.record.writer import RunWriter
from trimtab.report.html import write_html

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
    writer = RunWriter(tmp_path / "empty")
    writer.write(Closing(steps={"": 0}, rejected=0, findings=0, reason="closed"))
    writer.close()
    for path in (write_html(read_run(tmp_path / "empty")), write_page(tmp_path / "one", num_steps=1)):
        assert open_page(path).complaints == []


@pytest.mark.parametrize("values", [(1e308, -1e308), (5e-324, 1e308), (0.0, -0.0), (1e-300, 2e-300)])
def test_numbers_beyond_all_measure_are_drawn_without_complaint(
    open_page: Open, tmp_path: Path, values: tuple[float, float]
) -> None:
    layout = Layout(names=("w",), kinds=(Kind.GRAD,), numel=(4,), columns=NORM_COLUMNS)
    writer = RunWriter(tmp_path / "run")
    for step, value in enumerate([*values * 60, 1.0]):
        scalars = {"loss": value, "grad_norm": abs(value), "epoch": value, "clock": value}
        table = np.array([[min(abs(value), 3e38)]], np.float32)
        writer.write(Sample(step=step * 10**12, layout=layout, table=table, scalars=scalars))
    writer.close()
    seen = open_page(write_html(read_run(tmp_path / "run")))
    page = seen.page
    for button in page.locator(".scale button").all():
        button.click()
    drag(page, page.locator(".panel canvas").first, 500, 800)
    assert seen.complaints == []


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
    assert count(canvas, x - 3, 20, 6, 40, "--b1") > 20
    assert count(canvas, x + 60, 20, 6, 40, "--b1") == 0


def test_the_heat_map_shows_what_is_no_number(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    canvas = page.locator(".spacer canvas")
    height = (canvas.bounding_box()["height"] - 22) / 5  # the module "a" has a row of its own
    bad = x_of(canvas, BAD_STEP)
    assert count(canvas, bad - 3, height + 1, 6, height - 2, "--alarm") > 20
    assert count(canvas, bad - 3, 2 * height + 1, 6, height - 2, "--alarm") == 0
    assert count(canvas, x_of(canvas, 50), height + 1, 50, height - 2, "--alarm") == 0
    frozen = count(canvas, x_of(canvas, 20), 4 * height, 100, height, "--none-ink")
    absent = count(canvas, x_of(canvas, 20), 3 * height, 100, height, "--none-ink")
    zero = count(canvas, x_of(canvas, 220), 3 * height, 100, height, "--ink")
    assert min(frozen, absent, zero) > 20
    for step, row, words in (
        (BAD_STEP, 1, "NaN"),
        (50, 3, "no gradient"),
        (250, 3, "exactly zero"),
        (50, 4, "frozen"),
        (50, 1, "times its usual"),
        (50, 1, "times the middle layer"),
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
    for _ in range(2):
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


def picture(canvas: Any) -> str:
    return str(canvas.evaluate("c => c.toDataURL()"))


def labels(page: Any) -> list[str]:
    return [text.replace("●", "").strip() for text in page.locator(".row-label .text").all_inner_texts()]


def test_the_scale_is_chosen_with_a_visible_switch(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    canvas, scale = page.locator(".panel canvas").first, page.locator(".panel .scale").first
    before = picture(canvas)
    assert scale.locator("[aria-pressed=true]").inner_text() == "linear"
    scale.locator("[data-scale=log]").click()
    assert scale.locator("[aria-pressed=true]").inner_text() == "log"
    assert picture(canvas) != before
    scale.locator("[data-scale=linear]").click()
    assert picture(canvas) == before


def test_modules_fold_and_unfold_also_by_keyboard(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    assert labels(page) == ["a", "w", "b", "c", "d"]
    fold = page.locator("button.row-label")
    assert fold.get_attribute("aria-expanded") == "true"
    fold.click()
    assert labels(page) == ["a", "c", "d"]
    heat = page.locator(".spacer canvas")
    hover(page, heat, 700, 5)
    assert "(2 parameters)" in page.locator(".tip").inner_text()
    page.locator("button.row-label").focus()
    page.keyboard.press("Enter")
    assert labels(page) == ["a", "w", "b", "c", "d"]
    assert page.evaluate("document.activeElement.dataset.path") == "a"
    page.locator("[data-fold=all]").click()
    assert labels(page) == ["a", "c", "d"]


def test_a_layer_is_found_by_name_and_rows_are_sorted(open_page: Open, large: Path) -> None:
    page = open_page(large).page
    assert labels(page)[0].startswith("layers")
    page.locator(".search").fill("29.o")
    assert labels(page) == ["layers.29.o"]
    page.locator(".search").fill("no such layer")
    assert labels(page) == []
    assert "No layer is called" in page.locator(".more").inner_text()
    page.locator(".search").fill("")
    page.locator(".sort").select_option("worst")
    assert labels(page)[0] == "layers.0.q"  # it was NaN once
    page.locator(".sort").select_option("name")
    assert labels(page)[:2] == ["layers.0.k", "layers.0.o"]


def test_what_layers_are_compared_with_can_be_chosen(open_page: Open, large: Path) -> None:
    page = open_page(large).page
    heat = page.locator(".spacer canvas")
    seen = {picture(heat)}
    for mode, words in (("own", "times its usual"), ("absolute", ""), ("layers", "times the middle layer")):
        page.locator(f"[data-mode={mode}]").click()
        assert words in page.locator(".key").inner_text()
        seen.add(picture(heat))
    assert len(seen) >= 2


def test_three_thousand_rows_scroll_with_a_cue(open_page: Open, tall: Path) -> None:
    seen = open_page(tall)
    page = seen.page
    page.locator("[data-fold=none]").click()
    more = page.locator(".more")
    assert "of 3501: scroll for more" in more.inner_text()  # 3,000 parameters, 500 blocks and what holds them
    assert page.locator(".row-label").count() < 60
    began = page.evaluate("performance.now()")
    for top in range(0, 50_000, 5_000):
        page.locator(".scroller").evaluate("(e, top) => { e.scrollTop = top; }", top)
    page.locator(".scroller").evaluate("e => { e.scrollTop = 1e6; }")
    page.wait_for_function("() => document.querySelector('.more').textContent.includes('to 3501 of')", polling=50)
    assert page.evaluate("performance.now()") > began
    assert labels(page)[-1].endswith("f.weight")
    assert seen.complaints == []


def test_other_axes_are_offered_where_the_record_has_them(open_page: Open, machine: Path, small: Path) -> None:
    page = open_page(machine).page
    canvas = page.locator(".panel canvas").first
    before = picture(canvas)
    page.locator("[data-axis=time]").click()
    assert picture(canvas) != before
    hover(page, canvas, x_of(canvas, 200))
    assert page.locator(".at").inner_text() == "Step 200, 6.67 min"
    page.locator("[data-axis=epoch]").click()
    hover(page, canvas, x_of(canvas, 200))
    assert page.locator(".at").inner_text() == "Step 200, epoch 2"
    titles = page.locator(".panel h3").all_inner_texts()
    assert {"GPU memory", "GPU utilisation", "Waiting for data"} <= set(titles)
    assert "usual range" in page.locator(".panel", has_text="Update ratio").inner_text()
    assert open_page(small).page.locator(".axis").count() == 0


def test_two_optimizers_share_one_axis_and_one_count(open_page: Open, game: Path) -> None:
    page = open_page(game).page
    assert page.locator(".charts").count() == 1
    assert page.locator(".panel").first.locator(".legend .name").all_inner_texts() == ["generator", "discriminator"]
    assert page.locator(".tiles dd").first.inner_text() == "200"


def test_the_first_screen_says_what_to_do(open_page: Open, small: Path) -> None:
    page = open_page(small).page
    first = page.locator("header .do")
    assert "Set clip=1.0." in first.inner_text()
    assert first.bounding_box()["y"] + first.bounding_box()["height"] < 700
    first.locator("a").click()
    assert page.url.endswith("#incident-1")
    followed = page.locator("#incident-1 .followed")
    assert followed.locator(".trouble").is_hidden()
    followed.locator("summary").click()
    assert followed.locator(".trouble").is_visible()
    assert "1 of 4 gradients" in page.locator("#incident-1").inner_text()
    assert page.locator("#incident-1 li code").first.inner_text() == "clip=1.0"


def test_all_controls_are_reached_by_tab_and_show_it(open_page: Open, machine: Path) -> None:
    page = open_page(machine).page
    wanted = "a[href], button:not([hidden]), select, input, canvas[tabindex='0'], summary"
    total = page.evaluate(
        "(wanted) => [...document.querySelectorAll(wanted)].filter((n) => n.checkVisibility()).length", wanted
    )
    reached = set()
    for _ in range(total + 5):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(wanted) => [...document.querySelectorAll(wanted)].filter((n) => n.checkVisibility())"
                ".indexOf(document.activeElement)",
                wanted,
            )
        )
    assert reached >= set(range(total))


def test_on_paper_everything_is_dark_on_white(open_page: Open, small: Path) -> None:
    page = open_page(small, color_scheme="dark").page
    page.emulate_media(media="print")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 35, 41)"
    assert page.locator(".choices").first.is_hidden()
    assert len(page.pdf()) > 10_000


def test_crisp_on_fine_screens_and_after_a_resize(open_page: Open, small: Path) -> None:
    page = open_page(small, device_scale_factor=2).page
    sizes = "() => [...document.querySelectorAll('.panel canvas')].map(c => [c.width, 2 * c.clientWidth])"
    for width in (1280, 900, 420):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(200)
        for drawn, shown in page.evaluate(sizes):
            assert drawn == shown
        assert page.evaluate("document.documentElement.scrollWidth") <= width
