"""Every page is readable for everybody: contrast, names, headings and width, as the browser computes them.

axe-core looks at every page as well. It comes with the extra `browser`; without it that part is left out, unless
TRIMTAB_REQUIRE has `browser`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import NEEDED, write_page
from trimtab.record.reader import read_run
from trimtab.report.compare import compare_runs
from trimtab.report.compare_view import comparison_html
from trimtab.report.ui_server import UiServer

NAMELESS = """() => {
  const asked = "button, a, select, input, summary, th, iframe, [role=group], [role=img], [tabindex='0']";
  const spoken = (n) => [n.getAttribute("aria-label"), n.textContent, n.title, n.alt,
    ...(n.getAttribute("aria-labelledby") || "").split(" ").map((id) => document.getElementById(id)?.textContent),
    ...[...(n.labels || [])].map((label) => label.textContent)].join("").trim();
  return [...document.querySelectorAll(asked)].filter((n) => n.checkVisibility() && !spoken(n))
    .map((n) => n.outerHTML.slice(0, 80));
}"""
FAINT = """() => {
  const parse = (c) => {
    const [r, g, b, a = 1] = c.match(/[\\d.]+/g).map(Number);
    return c.startsWith("color(") ? [r * 255, g * 255, b * 255, a] : [r, g, b, a];
  };
  const over = ([r, g, b, a], below) => [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
  const light = (c) => c.map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const canvas = matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18] : [255, 255, 255];
  const behind = (n) => {
    const layers = [];
    for (; n; n = n.parentElement) {
      const c = parse(getComputedStyle(n).backgroundColor);
      layers.push(c);
      if (c[3] === 1) break;
    }
    return layers.reverse().reduce((below, c) => over(c, below), canvas);
  };
  const out = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let t = walker.nextNode(); t; t = walker.nextNode()) {
    const n = t.parentElement;
    if (!t.data.trim() || !n.checkVisibility() || n.disabled) continue;
    if (n.closest("script, style, title, .spoken, [aria-hidden=true]")) continue;
    const style = getComputedStyle(n), size = parseFloat(style.fontSize), bold = Number(style.fontWeight) >= 700;
    const ink = parse(n instanceof SVGElement ? style.fill : style.color), ground = behind(n);
    for (let up = n; up; up = up.parentElement) ink[3] *= Number(getComputedStyle(up).opacity);
    const [a, b] = [light(over(ink, ground)), light(ground)].sort((p, q) => q - p);
    const ratio = (a + 0.05) / (b + 0.05), least = size >= 24 || (bold && size >= 18.66) ? 3 : 4.5;
    if (ratio < least) out.push(`${ratio.toFixed(2)} ${n.className || n.tagName}: ${t.data.trim().slice(0, 40)}`);
  }
  return out;
}"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    more = {"gpu_memory": 2e9, "gpu_memory_peak": 3e9, "gpu_utilisation": 0.9, "data_wait": 0.25, "update_ratio": 1e-3}
    write_page(folder / "one", more=more)
    write_page(folder / "two", num_steps=280)
    text = comparison_html(compare_runs(read_run(folder / "one"), read_run(folder / "two")))
    (folder / "comparison.html").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def served(runs: Path) -> Iterator[UiServer]:
    server = UiServer(runs)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.stop()


def show(page: Any, which: str, runs: Path, served: UiServer) -> None:
    if which == "page":
        page.goto((runs / "one" / "report.html").as_uri())
        page.wait_for_selector("html[data-painted-ms]", state="attached")
        page.locator(".followed summary").first.click()
    elif which == "compare":
        page.goto((runs / "comparison.html").as_uri())
    else:
        page.goto(served.url)
        page.get_by_text("2 of 2").wait_for()
        if which == "ui, a run":
            page.get_by_role("link", name="one").click()
            page.frame_locator("#views iframe").locator("html[data-painted-ms]").wait_for(state="attached")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1600])
@pytest.mark.parametrize("which", ["page", "compare", "ui", "ui, a run"])
def test_contrast_names_headings_and_width(
    chromium: Any, runs: Path, served: UiServer, which: str, width: int, scheme: str
) -> None:
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    show(page, which, runs, served)
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(FAINT) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.documentElement.lang") == "en"
    assert page.title()
    levels = page.evaluate("() => [...document.querySelectorAll('h1, h2, h3, h4')].map((n) => Number(n.tagName[1]))")
    assert levels.count(1) == 1
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels))
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((n) => n.id)")
    assert len(ids) == len(set(ids))
    assert complaints == []
    if find_spec("axe_playwright_python") is None:
        assert not NEEDED, "TRIMTAB_REQUIRE wants axe-core in the browser: pip install -e '.[browser]'"
    else:
        page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
        found = page.evaluate("() => axe.run()")
        assert [(one["id"], one["nodes"][0]["html"][:100]) for one in found["violations"]] == []
    context.close()
