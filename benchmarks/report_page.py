"""The report page at scale: time, memory and size for runs of 10,000, 100,000 and 1,000,000 steps.

    python benchmarks/report_page.py [--steps 10000 100000 1000000] [--layers 1000] [--out FILE.md] [--keep FOLDER]

The records are fabricated, with the functions that the writer uses, and as its bound of 1 GB leaves them: every step
has its line, and as many steps have a table as fit. Each has a NaN step, a spike, a frozen layer and one without
gradients. Reading and writing the page run in a process of their own, whose peak memory is asked for afterwards;
Chromium is asked for the time until everything is drawn where it can be found.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

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
from trimtab.record.format import (
    LINES_NAME,
    TABLES_NAME,
    Thinned,
    encode_table,
    event_line,
    layout_line,
    run_line,
    sample_line,
    thinned_line,
)

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


MAX_BYTES = 1_000_000_000
LINE_BYTES = 400


class Record:
    """The two files of a record, written as fast as Python can."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._lines = (folder / LINES_NAME).open("wb")
        self._tables = (folder / TABLES_NAME).open("wb")
        self.seq = 0
        self._layouts: dict[int, int] = {}

    def _number(self) -> int:
        self.seq += 1
        return self.seq - 1

    def info(self, info: RunInfo) -> None:
        self._lines.write(run_line(info, self._number()))

    def sample(self, sample: Sample, *, with_table: bool) -> None:
        known = self._layouts.get(id(sample.layout))
        if known is None:
            known = self._layouts[id(sample.layout)] = self._number()
            self._lines.write(layout_line(sample.layout, known))
        seq = self._number()
        self._lines.write(sample_line(sample, seq, known))
        if with_table:
            self._tables.write(encode_table(sample, known, seq))

    def event(self, event: Verdict | Decision | Outcome | Closing) -> None:
        self._lines.write(event_line(event, self._number()))

    def close(self, num_thinned: int, num_steps: int) -> None:
        if num_thinned:
            complete = {"": (self.seq, num_steps)}
            self._lines.write(thinned_line(Thinned(0, num_thinned, complete), self._number()))
        self._lines.close()
        self._tables.close()


def fabricate(folder: Path, *, num_steps: int, num_layers: int) -> None:
    """Write a record as a guard would leave it."""
    rng = np.random.default_rng(0)
    names = tuple(f"encoder.layers.{i // 6}.{part}" for i, part in zip(range(num_layers), _parts(), strict=False))
    layout = Layout(names=names, kinds=(Kind.GRAD,) * num_layers, numel=(65_536,) * num_layers, columns=NORM_COLUMNS)
    record = Record(folder)
    record.info(
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
    pool = [level * np.exp(rng.normal(0, 0.3, num_layers)).astype(np.float32) for _ in range(64)]
    totals = [float(np.sqrt(np.square(norms, dtype=np.float64).sum())) for norms in pool]
    noise = rng.normal(size=(4096, 4))
    fit = max((MAX_BYTES - LINE_BYTES * num_steps) // (4 * num_layers + 40), 1)
    every = max(math.ceil(num_steps / fit), 1)
    nan_step, spike = num_steps // 3, 2 * num_steps // 3
    for step in range(num_steps):
        frac, random = step / num_steps, noise[step % 4096]
        norms, total = pool[step % 64], totals[step % 64] * (1.2 - frac)
        with_table = step % every == 0 or step in (nan_step, spike)
        if with_table:
            norms = norms * np.float32(1.2 - frac)
            norms[3] = FROZEN
            norms[7] = ABSENT if step < num_steps // 2 else norms[7]
            if step == nan_step:
                norms[num_layers // 2 :] = np.nan
        if spike <= step < spike + 6:
            total *= 40 * 0.6 ** (step - spike)
        total = math.nan if step == nan_step else total
        record.sample(
            Sample(
                step=step,
                layout=layout,
                table=norms[:, None],
                scalars=_scalars(step, frac, total, random, nonfinite=step == nan_step),
            ),
            with_table=with_table,
        )
        if step in (nan_step, spike):
            _trouble(record, step, nonfinite=step == nan_step)
    num_tables = len(range(0, num_steps, every))
    record.event(Closing(steps={"": num_steps}, rejected=1, findings=2, reason="closed"))
    record.close(num_steps - num_tables, num_steps)


def _scalars(step: int, frac: float, total: float, random: NDArray[np.float64], *, nonfinite: bool) -> dict[str, float]:
    """The numbers of one line; as in a record of a guard, some are measured every few steps only."""
    found = {"lr/0": 3e-4 * min(1.0, step / 500) * (0.5 + 0.5 * math.cos(math.pi * frac)), "clock": 0.2 * step}
    if step % 10 == 5:
        found |= {"fixed": 1.0, "chance": 9.0 + random[3]}
    found |= {"in_print": float(step * 2654435761 % 2**32), "in_rms": 1.0 + 0.01 * random[2]}
    if step % 10 == 2:
        found |= {"handed": 1.0, "grad_cos": 0.1 * random[3]}
    if step % 50 == 0:
        found |= {"out_spread": 1.0 + 0.1 * random[1], "weight_norm": 40.0 + random[0]}
    found |= {
        "clip_coef": min(1.0, 1.0 / total) if math.isfinite(total) else 1.0,
        "grad_norm": total,
        "rejected": float(nonfinite),
        "loss": math.nan if nonfinite else 6.0 * math.exp(-3 * frac) + 0.1 * random[0],
        "update_ratio": 1e-3 * math.exp(0.2 * random[1]),
    }
    if step % 5 == 3:
        found["moment_lag"] = 1.0 + random[2] ** 2
    return found


def _parts() -> list[str]:
    own = ("attn.qkv.weight", "attn.out.weight", "mlp.up.weight", "mlp.down.weight", "norm1.weight", "norm2.weight")
    return list(own) * 1000


def _trouble(record: Record, step: int, *, nonfinite: bool) -> None:
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
    record.event(Verdict(step=step, seen_at=step, findings=(finding,)))
    action = Action(kind="cut_lr", args={"factor": 0.5})
    record.event(Decision(about=step, at=step + 1, actions=(action,), because=(finding.code,)))
    record.event(Outcome(at=step + 1, action=action, applied=True, detail="the multiplier is 0.5"))


_WRITE = """
import json, resource, sys, time
began = time.perf_counter()
from trimtab.record.reader import read_run
from trimtab.report.figures import on_page
from trimtab.report.html import write_html
loaded = time.perf_counter()
run = read_run(sys.argv[1], keep=on_page)
read = time.perf_counter()
write_html(run, sys.argv[2])
done = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([loaded - began, read - loaded, done - read, time.process_time(), peak]))
"""


def build_times(folder: Path, page: Path) -> dict[str, float]:
    """Seconds and bytes of a process that reads a record and writes its page; the fastest of three."""
    runs = []
    for _ in range(3):
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _WRITE, str(folder), str(page)], check=True, capture_output=True, text=True
        )
        imports, read, write, used, peak = json.loads(done.stdout)
        whole = time.perf_counter() - began
        runs.append({"all": whole, "imports": imports, "read": read, "write": write, "used": used, "peak": peak})
    return min(runs, key=lambda run: run["all"])


def paint_times(page: Path) -> list[float] | None:
    """Milliseconds from navigation in Chromium to the first full frame."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    if chromium is None:
        return None
    found: list[float] = []
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=chromium, args=FLAGS)
        for _ in range(5):
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            tab.goto(page.resolve().as_uri())
            tab.wait_for_selector("html[data-painted-ms]", state="attached")
            found.append(float(tab.evaluate("() => Number(document.documentElement.dataset.paintedMs)")))
            tab.close()
        browser.close()
    return found


def measure(folder: Path, *, num_steps: int, num_layers: int) -> str:
    """One row of the table."""
    if not folder.exists():
        fabricate(folder, num_steps=num_steps, num_layers=num_layers)
    page = folder.parent / f"{folder.name}.html"
    record = sum(path.stat().st_size for path in folder.iterdir())
    times, painted = build_times(folder, page), paint_times(page)
    drawn = "n/a" if painted is None else f"{statistics.median(painted):.0f}"
    return (
        f"| {num_steps:,} | {record / 1e6:,.0f} | {times['read']:.2f} | {times['write']:.2f} | {times['all']:.2f} | "
        f"{times['used']:.2f} | {times['peak'] / 1e6:,.0f} | {page.stat().st_size / 1e6:.2f} | {drawn} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--layers", type=int, default=1_000)
    parser.add_argument("--out", type=Path, help="also write the result here")
    parser.add_argument("--keep", type=Path, help="keep records and pages in this folder")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        parent = given.keep or Path(temporary)
        rows = [measure(parent / f"run_{n}", num_steps=n, num_layers=given.layers) for n in given.steps]
    lines = [
        f"# Report page: {given.layers:,} rows",
        "",
        f"`python benchmarks/report_page.py`, {os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, numpy {np.__version__}, load average {os.getloadavg()[0]:.1f} at the end: other "
        "work on the same cores slows the clock. Each row is the fastest of three processes that import, read, write.",
        "",
        "| steps | record, MB | reading, s | page, s | whole process, s | processor, s | peak memory, MB | page, MB "
        "| drawn in Chromium, ms |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text, end="")
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
