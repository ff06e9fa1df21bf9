"""A real Chromium, driven by playwright. Without one these tests are skipped, unless TRIMTAB_REQUIRE has `browser`."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from trimtab.core.types import (
    ABSENT,
    FROZEN,
    NORM_COLUMNS,
    Action,
    Closing,
    Decision,
    Finding,
    Kind,
    Layout,
    Outcome,
    RunInfo,
    Sample,
    Severity,
    Verdict,
)
from trimtab.record.reader import read_run
from trimtab.record.writer import RunWriter
from trimtab.report.html import write_html

NEEDED = "browser" in os.environ.get("TRIMTAB_REQUIRE", "")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
BAD_STEP, SPIKE_STEP = 150, 210
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


class Seen(NamedTuple):
    """A page in a browser, and everything it did besides showing itself."""

    page: Any
    requests: list[str]
    complaints: list[str]


@pytest.fixture(scope="module")  # its event loop must not live on into other tests
def chromium() -> Iterator[Any]:
    if find_spec("playwright") is None or CHROMIUM is None:
        if NEEDED:
            pytest.fail(f"TRIMTAB_REQUIRE wants a browser; chromium: {CHROMIUM}, pip install -e '.[browser]'")
        pytest.skip("needs playwright and chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        started = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield started
        started.close()


Open = Callable[..., Seen]


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Open]:
    """Opens a page from disk and listens to all it does."""
    contexts = []

    def open_it(path: Path, **options: Any) -> Seen:
        context = chromium.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        seen = Seen(page, [], [])
        page.on("request", lambda request: seen.requests.append(request.url))
        page.on("console", lambda message: seen.complaints.append(message.text))
        page.on("pageerror", lambda error: seen.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (seen.complaints.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri())
        page.wait_for_selector(
            "html[data-painted-ms]", state="attached"
        )  # a polled string would need eval, which the page forbids
        return seen

    yield open_it
    for context in contexts:
        context.close()


def loss_at(step: int) -> float:
    if step == BAD_STEP:
        return math.nan
    return 50.0 if step == SPIKE_STEP else round(1.0 + step / 1000, 3)


def write_page(
    folder: Path,
    *,
    num_steps: int = 300,
    names: tuple[str, ...] = ("a.w", "a.b", "c", "d"),
    more: dict[str, float] | None = None,
) -> Path:
    """The page of a run with a NaN step, a spike of one step, a frozen row and one without gradients for a while."""
    layout = Layout(names=names, kinds=(Kind.GRAD,) * len(names), numel=(4,) * len(names), columns=NORM_COLUMNS)
    writer = RunWriter(folder)
    writer.write(
        RunInfo(
            run_id=EVIL,
            started="2026-01-01T00:00:00+00:00",
            config={"mode": "act"},
            versions={},
            model="Toy",
            num_parameters=16,
            optimizers=("",),
            rules=(),
        )
    )
    for step in range(num_steps):
        norms = np.full(len(names), 1.0 + (step % 5) / 10, dtype=np.float32)
        norms[-1] = FROZEN
        norms[-2] = ABSENT if step < 100 else 0.0
        if step == BAD_STEP:
            norms[0] = np.nan
        bad = step == BAD_STEP
        scalars = {"loss": loss_at(step), "grad_norm": math.nan if bad else 2.0, "rejected": float(bad), "lr/0": 0.1}
        if more is not None:
            scalars |= more | {"epoch": step / 100, "clock": 1e9 + 2.0 * step}
        writer.write(Sample(step=step, layout=layout, table=norms[:, None], scalars=scalars))
    for step, severity in ((BAD_STEP, Severity.ERROR), (SPIKE_STEP, Severity.WARN)):
        finding = Finding(
            code="GRAD001",
            name=EVIL,
            step=step,
            severity=severity,
            message=f"{EVIL} at {step}",
            subject=(names[0],),
            evidence={"num_tensors": 1.0, "num_measured": float(len(names))},
            advice=("Set `clip=1.0`.", EVIL),
        )
        follows = Finding(code="LOSS001", name="nonfinite-loss", step=step, severity=severity, message="It followed.")
        writer.write(Verdict(step=step, seen_at=step, findings=(finding, follows)))
    action = Action(kind="cut_lr", args={"factor": 0.5})
    writer.write(Decision(about=BAD_STEP, at=BAD_STEP + 1, actions=(action,), because=("GRAD001",)))
    writer.write(Outcome(at=BAD_STEP + 1, action=action, applied=True, detail=EVIL))
    writer.write(Closing(steps={"": num_steps}, rejected=1, findings=2, reason="closed"))
    writer.close()
    return write_html(read_run(folder))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More steps than pixels and more rows than fit."""
    names = tuple(f"layers.{i // 4}.{part}" for i, part in zip(range(120), ["q", "k", "v", "o"] * 30, strict=True))
    return write_page(tmp_path_factory.mktemp("large"), num_steps=5000, names=names)


@pytest.fixture(scope="session")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose record knows epochs, the clock and what the machine did."""
    more = {"gpu_memory": 2e9, "gpu_memory_peak": 3e9, "gpu_utilisation": 0.9, "data_wait": 0.25, "update_ratio": 1e-3}
    return write_page(tmp_path_factory.mktemp("machine"), more=more)


@pytest.fixture(scope="session")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two optimizers side by side."""
    folder = tmp_path_factory.mktemp("game")
    writer = RunWriter(folder)
    for step in range(200):
        for who in ("generator", "discriminator"):
            layout = Layout(names=(f"{who}.w",), kinds=(Kind.GRAD,), numel=(4,), columns=NORM_COLUMNS, optimizer=who)
            scalars = {"loss": 1.0 + len(who) / 100, "grad_norm": 1.0}
            writer.write(Sample(step=step, layout=layout, table=np.ones((1, 1), np.float32), scalars=scalars))
    writer.write(Closing(steps={"generator": 200, "discriminator": 200}, rejected=0, findings=0, reason="closed"))
    writer.close()
    return write_html(read_run(folder))


@pytest.fixture(scope="session")
def tall(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3,000 rows."""
    names = tuple(f"blocks.{i // 6}.{part}.weight" for i, part in zip(range(3000), list("abcdef") * 500, strict=True))
    return write_page(tmp_path_factory.mktemp("tall"), num_steps=220, names=names)
