"""`trimtab ui` in a real browser: runs appear and grow by themselves, are filtered, opened and compared."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser.conftest import EVIL, Seen
from trimtab.core.types import NORM_COLUMNS, Closing, Finding, Kind, Layout, RunInfo, Sample, Severity, Verdict
from trimtab.record.writer import RunWriter
from trimtab.report.ui_server import UiServer

LAYOUT = Layout(names=("a.w", EVIL), kinds=(Kind.GRAD,) * 2, numel=(4, 4), columns=NORM_COLUMNS)


class Growing:
    """A run that is written while somebody looks."""

    def __init__(self, folder: Path, script: str) -> None:
        self.writer, self.step = RunWriter(folder), 0
        self.writer.write(
            RunInfo(
                run_id=folder.name,
                started="2026-01-01T00:00:00+00:00",
                config={},
                versions={},
                model=EVIL,
                num_parameters=8,
                optimizers=("",),
                rules=(),
                script=script,
            )
        )

    def grow(self, num: int, *, bad: bool = False) -> None:
        for _ in range(num):
            scalars = {"loss": 1.0 / (1 + self.step), "grad_norm": math.nan if bad else 1.0}
            table = np.ones((2, 1), np.float32)
            self.writer.write(Sample(step=self.step, layout=LAYOUT, table=table, scalars=scalars))
            self.step += 1
        if bad:
            finding = Finding(code="GRAD001", name="nonfinite-gradient", step=self.step - 1, severity=Severity.ERROR,
                              message=EVIL, advice=("Lower the learning rate.",))  # fmt: skip
            self.writer.write(Verdict(step=self.step - 1, seen_at=self.step - 1, findings=(finding,)))
        self.writer.flush()

    def close(self) -> None:
        self.writer.write(Closing(steps={"": self.step}, rejected=0, findings=0, reason="closed"))
        self.writer.close()


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UiServer]:
    monkeypatch.setattr("trimtab.report.ui_server.LOOK_S", 0.1)
    server = UiServer(tmp_path)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.stop()


@pytest.fixture
def browse(chromium: Any, served: UiServer) -> Iterator[Seen]:
    context = chromium.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    seen = Seen(page, [], [])
    page.on("request", lambda request: seen.requests.append(request.url))
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("dialog", lambda dialog: (seen.complaints.append(dialog.message), dialog.dismiss()))
    page.goto(served.url)
    yield seen
    context.close()


def quiet(seen: Seen, served: UiServer) -> None:
    """Nothing was asked of anybody else, and nothing went wrong."""
    assert [url for url in seen.requests if not url.startswith(served.url)] == []
    assert seen.complaints == []


def test_runs_appear_and_grow_by_themselves(browse: Seen, served: UiServer, tmp_path: Path) -> None:
    page = browse.page
    page.get_by_text("One appears here by itself").wait_for()
    first = Growing(tmp_path / "first", "train.py")
    first.grow(10)
    page.get_by_role("cell", name="10", exact=True).wait_for()
    page.get_by_text("nothing found so far").wait_for()
    first.grow(15, bad=True)
    page.get_by_text("trouble: nonfinite-gradient at step 24").wait_for()
    first.close()
    page.get_by_role("cell", name="ended").wait_for()
    quiet(browse, served)


def test_an_open_report_follows_its_run(browse: Seen, served: UiServer, tmp_path: Path) -> None:
    page = browse.page
    run = Growing(tmp_path / "live", "train.py")
    run.grow(10)
    page.get_by_role("link", name="live").click()
    page.get_by_text("live, 10 steps").wait_for()
    view = page.frame_locator("#views iframe >> nth=0")
    view.locator("body").wait_for()
    before = page.locator("#views").get_attribute("data-updates")
    run.grow(20, bad=True)
    page.get_by_text("live, 30 steps").wait_for()
    view.get_by_text("Lower the learning rate.").first.wait_for()
    page.get_by_label("pause updates").check()
    paused = page.locator("#views").get_attribute("data-updates")
    assert paused != before
    run.grow(5)
    page.get_by_text("live, 35 steps").wait_for()
    page.get_by_label("pause updates").uncheck()
    run.close()
    page.get_by_text("ended, 35 steps").wait_for()
    page.get_by_role("link", name="All runs").click()
    page.get_by_role("heading", name="Runs").wait_for()
    quiet(browse, served)


def test_what_the_reader_chose_stays_while_the_run_grows(browse: Seen, served: UiServer, tmp_path: Path) -> None:
    page = browse.page
    run = Growing(tmp_path / "live", "train.py")
    run.grow(59)
    run.grow(1, bad=True)
    page.get_by_role("link", name="live").click()
    view = page.frame_locator("#views iframe")
    view.locator("html[data-painted-ms]").wait_for(state="attached")
    frame = page.frames[-1]
    loss = view.locator(".panel canvas").first
    loss.focus()
    for key in ("Home", "+", "+"):
        page.keyboard.press(key)
    view.get_by_role("group", name="Scale of Loss").get_by_role("button", name="log").click()
    view.get_by_text("What to try").first.click()  # was open
    view.get_by_label("Find a layer by name").fill("a.w")
    frame.evaluate("window.scrollTo(0, 240)")

    def chosen() -> list[object]:
        asked = "[sections[0].view, sections[0].parts[0].log, sections[0].parts.at(-1).query, sections[0].zoomed]"
        return [frame.evaluate(asked), frame.evaluate("document.querySelector('details.advice').open")]

    before, top = chosen(), frame.evaluate("sections[0].node.getBoundingClientRect().top")
    assert before[1] is False
    run.grow(40, bad=True)
    view.locator(".tiles").get_by_text("100", exact=True).wait_for()
    view.locator("#incident-2").wait_for()
    assert chosen() == before
    assert frame.evaluate("document.activeElement.className") == "search"
    assert abs(frame.evaluate("sections[0].node.getBoundingClientRect().top") - top) <= 1
    assert frame.evaluate("sections[0].info.last") == 99
    view.get_by_role("button", name="Show all steps").click()
    assert frame.evaluate("sections[0].view") == [-0.5, 99.5]
    run.close()
    page.get_by_text("ended, 100 steps").wait_for()
    assert page.locator("#views iframe").count() == 1
    assert page.frames[-1] == frame  # it was never loaded again
    quiet(browse, served)


def test_filter_and_compare_with_the_keyboard(browse: Seen, served: UiServer, tmp_path: Path) -> None:
    page = browse.page
    for name, script in (("one", "train.py"), ("two", "train.py"), (EVIL.replace("/", "_")[:60], "other.py")):
        run = Growing(tmp_path / name, script)
        run.grow(12)
        run.close()
    page.get_by_text("3 of 3").wait_for()
    page.get_by_label("Filter").focus()
    page.keyboard.type("train.py")
    page.get_by_text("2 of 3").wait_for()
    for name in ("one", "two"):
        page.get_by_label(f"compare {name}").focus()
        page.keyboard.press("Space")
    page.get_by_role("button", name="Compare these two").focus()
    page.keyboard.press("Enter")
    page.get_by_text("The losses are the same at every step").wait_for()
    assert page.locator(".picture svg").count() == 2
    quiet(browse, served)


@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1600, "light")])
def test_it_fits_narrow_and_wide_windows(
    browse: Seen, served: UiServer, tmp_path: Path, width: int, scheme: str
) -> None:
    page = browse.page
    run = Growing(tmp_path / "one", "train.py")
    run.grow(12)
    run.close()
    page.emulate_media(color_scheme=scheme)
    page.set_viewport_size({"width": width, "height": 700})
    page.get_by_text("1 of 1").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    quiet(browse, served)
