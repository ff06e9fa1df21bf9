"""Sizes and times of the report page for a long run of a deep model: reading, reducing, rendering, first paint.

    python benchmarks/report_page.py [--steps 20000] [--layers 300] [--out FILE.md] [--keep FOLDER]

The record is fabricated, but through the real writer: 20,000 steps of 300 parameters with a NaN step, a spike, a
frozen layer and one without gradients. Chromium is asked for the time until everything is drawn where it can be found.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

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
from trimtab.report.figures import make_figures
from trimtab.report.html import page_data, to_script, write_html
from trimtab.report.summary import summarise

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def fabricate(folder: Path, *, num_steps: int, num_layers: int) -> None:
    """Write a record as a guard would."""
    rng = np.random.default_rng(0)
    blocks = [f"encoder.layers.{i // 6}.{part}" for i, part in zip(range(num_layers), _parts(), strict=False)]
    layout = Layout(
        names=tuple(blocks), kinds=(Kind.GRAD,) * num_layers, numel=(65_536,) * num_layers, columns=NORM_COLUMNS
    )
    full = Layout(
        names=layout.names * 3,
        kinds=tuple(kind for kind in (Kind.GRAD, Kind.WEIGHT, Kind.UPDATE) for _ in blocks),
        numel=layout.numel * 3,
    )
    writer = RunWriter(folder)
    writer.write(
        RunInfo(
            run_id="deep-and-long",
            started="2026-11-15T09:00:00+00:00",
            config={"mode": "act", "clip": {"norm": 1.0}},
            versions={"torch": "2.13.0", "python": "3.11"},
            model="Encoder",
            num_parameters=65_536 * num_layers,
            optimizers=("",),
            rules=("GRAD001",),
        )
    )
    level = np.exp(rng.normal(-2.0, 1.0, num_layers)).astype(np.float32)
    nan_step, spike = num_steps // 3, 2 * num_steps // 3
    for step in range(num_steps):
        frac = step / num_steps
        norms = level * np.exp(rng.normal(0, 0.3, num_layers)).astype(np.float32) * np.float32(1.2 - frac)
        norms[3] = FROZEN
        norms[7] = ABSENT if step < num_steps // 2 else norms[7]
        if spike <= step < spike + 6:
            norms *= np.float32(40 * 0.6 ** (step - spike))
        if step == nan_step:
            norms[num_layers // 2 :] = np.nan
        thorough = step % 50 == 0
        total = float(np.sqrt(np.square(norms[norms > 0], dtype=np.float64).sum())) if step != nan_step else math.nan
        writer.write(
            Sample(
                step=step,
                layout=full if thorough else layout,
                table=np.repeat(np.tile(norms, 3)[:, None], 7, axis=1) if thorough else norms[:, None],
                scalars={
                    "loss": math.nan if step == nan_step else 6.0 * math.exp(-3 * frac) + 0.1 * rng.normal(),
                    "grad_norm": total,
                    "clip_coef": min(1.0, 1.0 / total) if math.isfinite(total) else 1.0,
                    "rejected": float(step == nan_step),
                    "update_ratio": 1e-3 * math.exp(0.2 * rng.normal()),
                    "in_rms": 1.0 + 0.01 * rng.normal(),
                    "in_print": float(rng.integers(2**32)),
                    "handed": 1.0,
                    "grad_cos": 0.1 * rng.normal(),
                    "lr/0": 3e-4 * min(1.0, step / 500) * (0.5 + 0.5 * math.cos(math.pi * frac)),
                },
            )
        )
        if step in (nan_step, spike):
            _trouble(writer, step, nonfinite=step == nan_step)
    writer.write(Closing(steps={"": num_steps}, rejected=1, findings=2, reason="closed"))
    writer.close()


def _parts() -> list[str]:
    own = ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight", "norm1.weight", "norm2.weight")
    return list(own) * 1000


def _trouble(writer: RunWriter, step: int, *, nonfinite: bool) -> None:
    finding = Finding(
        code="GRAD001" if nonfinite else "GRAD003",
        name="nonfinite-gradient" if nonfinite else "gradient-spike",
        step=step,
        severity=Severity.ERROR if nonfinite else Severity.WARN,
        message="half of the gradients are NaN." if nonfinite else "the gradient norm is 40 times its median.",
        subject=("encoder.layers.25.attn.qkv.weight",) if nonfinite else (),
        evidence={"grad_norm": math.nan if nonfinite else 40.0},
        advice=("Look at the batch of this step.", "Lower the learning rate."),
    )
    writer.write(Verdict(step=step, seen_at=step, findings=(finding,)))
    action = Action(kind="cut_lr", args={"factor": 0.5})
    writer.write(Decision(about=step, at=step + 1, actions=(action,), because=(finding.code,)))
    writer.write(Outcome(at=step + 1, action=action, applied=True, detail="the multiplier is 0.5"))


def timed(body: Callable[[], Any], repeats: int = 9) -> tuple[list[float], Any]:
    """Seconds on the clock (median, fastest), processor seconds of the fastest, and the last result."""
    clock, used, result = [], [], None
    for _ in range(repeats):
        began, began_used = time.perf_counter(), time.process_time()
        result = body()
        clock.append(time.perf_counter() - began)
        used.append(time.process_time() - began_used)
    return [statistics.median(clock), min(clock), min(used)], result


def build_times(folder: Path, page: Path) -> dict[str, list[float]]:
    """Seconds of every stage in this process, and of all of it."""
    all_s, _ = timed(lambda: write_html(read_run(folder), page))  # first: as in a process that does nothing else
    read_s, run = timed(lambda: read_run(folder))
    summary_s, summary = timed(lambda: summarise(run))
    near = {"": [i.onset for i in summary.incidents]}
    figures_s, figures = timed(lambda: make_figures(run, near))
    data_s, _ = timed(lambda: to_script(page_data(summary, figures)))
    return {
        "reading the record (`read_run`)": read_s,
        "summary and incidents (`summarise`)": summary_s,
        "reduction to charts and heat map (`make_figures`)": figures_s,
        "data of the page as JSON": data_s,
        "**from the record to the written page**": all_s,
    }


def paint_times(page: Path) -> dict[str, tuple[float, float]] | None:
    """Milliseconds from navigation in Chromium: everything drawn, load event, first frame after it."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    found: list[list[float]] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        for _ in range(9):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            tab.goto(page.resolve().as_uri())
            tab.wait_for_function("document.documentElement.dataset.paintedMs")
            found.append(
                tab.evaluate(
                    """() => {
                        const {drawMs, paintedMs} = document.documentElement.dataset;
                        const load = performance.getEntriesByType("navigation")[0].loadEventEnd;
                        return [Number(drawMs), load, Number(paintedMs)];
                    }"""
                )
            )
            tab.close()
        browser.close()
    names = (
        "drawing every chart (script start to end)",
        "load event after navigation",
        "first full frame after navigation",
    )
    columns = zip(*found, strict=True)
    return dict(zip(names, ((statistics.median(c), min(c)) for c in columns), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--layers", type=int, default=300)
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--keep", type=Path, help="keep record and page in this folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.keep or Path(temporary)) / "run"
        if not folder.exists():
            fabricate(folder, num_steps=given.steps, num_layers=given.layers)
        page = folder.parent / "report.html"
        times, painted = build_times(folder, page), paint_times(page)
        size = {p.name: p.stat().st_size / 1e6 for p in (*sorted(folder.iterdir()), page)}
    lines = [
        f"# Report page: {given.steps:,} steps, {given.layers} layers",
        "",
        f"`python benchmarks/report_page.py`, {os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, numpy {np.__version__}. Load average "
        f"{os.getloadavg()[0]:.1f} during the run: other work on the same cores slows the clock; the fastest of 9 "
        "and its processor time come closest to an idle machine.",
        "",
        "| file | MB |",
        "|---|---:|",
        *(f"| {name} | {mb:.2f} |" for name, mb in size.items()),
        "",
        "| building the page, seconds | median | fastest | processor |",
        "|---|---:|---:|---:|",
        *(f"| {name} | {' | '.join(f'{s:.2f}' for s in seconds)} |" for name, seconds in times.items()),
    ]
    if painted is not None:
        lines += ["", "| in Chromium, headless, 1280 x 900, no GPU, ms | median | fastest |", "|---|---:|---:|"]
        lines += [f"| {name} | {middle:.0f} | {best:.0f} |" for name, (middle, best) in painted.items()]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
