"""Every framework in every setting, guarded by its callback and by `trimtab run`, and what guarding costs in each.

    python benchmarks/frameworks.py --out benchmarks/results/frameworks_cpu2_DATE.md

The matrix is `pytest -m "" tests/integrations/frameworks/test_matrix.py`: a healthy training must be bit-identical,
silent and recorded as it was (losses, norms before clipping); of one with a NaN sample everything must stay finite, and
nothing but the sample, the loss and the gradient be named.

Overhead: the three models of overhead.py in every framework, beside `clip_grad_norm_` in a plain loop, and the limits
that `Guard` itself has to keep (frameworks_overhead.py).

Cost: processor time of this process per step, as the difference between a long and a short training, so that what a
framework does before the first step does not count. The ways to train take turns; the fastest of each counts.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
PACKAGES = ("torch", "lightning", "transformers", "accelerate", "pytorch-ignite", "fastai", "keras", "trl", "peft")
SHORT, LONG = 40, 240
OVERHEAD = """\
Processor time of the whole process per step, steady state after 100 steps, recording on, one torch thread. The arms of
a framework take turns in short blocks, in shuffled order, in one process; the records of a block are written in its
time. The estimate is that of overhead.py: at each place of a cycle one of the quietest blocks, then the mean over
places. In brackets: the middle 90 % of bootstrap draws. "paired": the median of differences in the same round, as a
ratio. Every arm is compared with the same framework unguarded; the unit is `clip_grad_norm_` in a plain loop.
"""


def matrix(workers: int) -> dict[tuple[str, str, str], list[bool]]:
    """By framework, way and setting: whether the healthy run and the one with a NaN passed."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.xml"
        words = [sys.executable, "-m", "pytest", "-q", "-m", "", "-n", str(workers), f"--junitxml={path}"]
        where = {"TRIMTAB_REQUIRE": "frameworks", "KERAS_BACKEND": "torch", "HF_HUB_OFFLINE": "1"}
        target = "tests/integrations/frameworks/test_matrix.py"
        subprocess.run([*words, target], cwd=ROOT, env={**os.environ, **where}, check=False)
        found: dict[tuple[str, str, str], list[bool]] = defaultdict(list)
        for case in ET.parse(path).iter("testcase"):
            name = case.get("name", "").partition("[")[2].rstrip("]")
            for way in ("callback", "run"):
                framework, mark, setting = name.partition(f"-{way}-")
                if mark:
                    bad = any(case.find(kind) is not None for kind in ("failure", "error", "skipped"))
                    found[framework, way, setting].append(not bad)
    return found


def matrix_page(found: dict[tuple[str, str, str], list[bool]]) -> list[str]:
    settings = list(dict.fromkeys(setting for _, _, setting in found))
    lines = ["| framework | guarded by | " + " | ".join(settings) + " |", "|---|---|" + "---|" * len(settings)]
    for framework, way in dict.fromkeys((framework, way) for framework, way, _ in found):
        cells = [found.get((framework, way, setting), []) for setting in settings]
        texts = ["n/a" if not cell else f"{sum(cell)} of {len(cell)}" for cell in cells]
        lines.append(f"| {framework} | {way} | " + " | ".join(texts) + " |")
    passed, num = sum(sum(cell) for cell in found.values()), sum(len(cell) for cell in found.values())
    return [f"{passed} of {num} cases pass (each cell: a healthy run, and one with a NaN sample).", "", *lines]


def cost(rounds: int) -> list[str]:
    from tests.integrations.frameworks.harness import FRAMEWORKS, Case, under_run

    lines = [
        "| framework | step alone, us | callback adds, us | `trimtab run` adds, us |",
        "|---|---|---|---|",
    ]
    for name, framework in FRAMEWORKS.items():
        drive = framework.drive
        ways: dict[str, Callable[[Case], object]] = {
            "alone": lambda case, drive=drive: drive(case, guarded=False),  # type: ignore[misc]
            "callback": lambda case, drive=drive: drive(case, guarded=True),  # type: ignore[misc]
            "run": lambda case, drive=drive: under_run(drive)(case, guarded=True),  # type: ignore[misc]
        }
        best: dict[tuple[str, int], float] = {}
        for _ in range(rounds):
            for way, train in ways.items():
                for steps in (SHORT, LONG):
                    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                        began = time.process_time()
                        train(Case(steps=steps, clip=0.05))
                        took = time.process_time() - began
                    best[way, steps] = min(took, best.get((way, steps), took))
        step = {way: 1e6 * (best[way, LONG] - best[way, SHORT]) / (LONG - SHORT) for way in ways}
        alone = step["alone"]
        added = [
            f"{step[way] - alone:+.0f} ({100 * (step[way] - alone) / alone:+.0f} %)" for way in ("callback", "run")
        ]
        lines.append(f"| {name} | {alone:.0f} | {added[0]} | {added[1]} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=["matrix", "cost", "overhead"])
    parser.add_argument("--share", type=float, default=0.25, help="of the repetitions of overhead.py, for `overhead`")
    parser.add_argument("--frameworks", type=lambda text: text.split(","), help="only these, for `overhead`")
    parser.add_argument("--models", type=lambda text: text.split(","), help="only these, for `overhead`")
    asked = parser.parse_args()
    os.environ.setdefault("KERAS_BACKEND", "torch")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    versions = []
    for package in PACKAGES:
        with contextlib.suppress(ImportError):
            versions.append(f"{package} {version(package)}")
    lines = ["# Frameworks on the CPU", "", f"Command: `python benchmarks/frameworks.py {' '.join(sys.argv[1:])}`", ""]
    lines += [", ".join(versions), ""]
    if asked.only in (None, "matrix"):
        lines += ["## Framework x precision x accumulation x clipping", "", *matrix_page(matrix(asked.workers)), ""]
    if asked.only in (None, "overhead"):
        from frameworks_overhead import DRIVERS, overhead
        from overhead import MODELS

        names = asked.models or [model.name for model in MODELS]
        lines += ["## Overhead", "", *overhead(asked.share, asked.frameworks or list(DRIVERS), names)]
        lines += [OVERHEAD, ""]
    if asked.only in (None, "cost"):
        lines += ["## What guarding costs", "", *cost(asked.rounds), ""]
        lines += [
            "Processor time per step of a classifier with 227 parameters in 6 tensors, clipped, fp32. Fastest of "
            f"{asked.rounds} rounds; the difference of trainings of {LONG} and {SHORT} steps.",
            "",
        ]
    text = "\n".join(lines)
    if asked.out is not None:
        asked.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
