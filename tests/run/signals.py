"""Sends signals at random moments to trainings under `trimtab run`, and looks at what is left of their records.

    python -m tests.run.signals --count 200

INT, TERM and KILL, with and without checkpoints: while the program starts, when the record appears, in the first 250 ms
of training, and later. What has to hold: wherever there is a folder there is a record that can be read; INT and TERM
close it, and end the process with the status that they end it with anyway; KILL loses at most 0.3 s of steps; and the
run is the one that `trimtab report` would show, as interrupted or unfinished. Exit code 0 if all of that held, else 1.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import trimtab
from trimtab.record.reader import find_run, read_run
from trimtab.report.summary import Health, summarise

LONGEST_LOSS_S = 0.3
STEP = struct.Struct("<qd")
MOMENTS = {"starting": (0.0, 5.0), "record begins": (0.0, 0.05), "first 250 ms": (0.0, 0.25), "later": (0.25, 2.0)}
SIGNALS = {"INT": signal.SIGINT, "TERM": signal.SIGTERM, "KILL": signal.SIGKILL}
SOURCE = Path(trimtab.__file__).parents[1]
PROGRAM = """
import os, struct, time
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
told = os.open("steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
step = 0
while True:
    optimizer.zero_grad()
    x = torch.randn(16, 8)
    (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
    optimizer.step()
    os.write(told, struct.pack("<qd", step, time.monotonic()))
    step += 1
    time.sleep(0.002)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One signal: which, when, and whether checkpoints are saved."""

    name: str
    moment: str
    delay_s: float
    checkpoints: bool


@dataclass(slots=True, kw_only=True)
class Result:
    """What was left, and what is wrong with that."""

    plan: Plan
    folders: int = 0
    steps: int = 0
    lost_steps: int = 0
    lost_s: float = 0.0
    wrong: list[str] = field(default_factory=list)


def plans(count: int, seed: int) -> Iterator[Plan]:
    """All combinations in turn, at random moments."""
    chance = random.Random(seed)
    kinds = [(n, m, c) for m in MOMENTS for n in SIGNALS for c in (False, True)]
    for i in range(count):
        name, moment, checkpoints = kinds[i % len(kinds)]
        yield Plan(name=name, moment=moment, delay_s=chance.uniform(*MOMENTS[moment]), checkpoints=checkpoints)


def send(plan: Plan, folder: Path) -> Result:
    """Start a training in this folder, end it with the signal, and look."""
    (folder / "train.py").write_text(PROGRAM, encoding="utf-8")
    words = ["--checkpoint", "saved"] if plan.checkpoints else []
    command = [sys.executable, "-m", "trimtab", "run", *words, "train.py"]
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        if plan.moment != "starting":
            _wait_for(process, folder / ("trimtab_runs" if plan.moment == "record begins" else "steps"))
        time.sleep(plan.delay_s)
        process.send_signal(SIGNALS[plan.name])
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    result = Result(plan=plan)
    _look(result, folder, code)
    return result


def _wait_for(process: subprocess.Popen[bytes], path: Path) -> None:
    while process.poll() is None and (not path.exists() or path.stat().st_size == 0):
        time.sleep(0.0005)


def _look(result: Result, folder: Path, code: int) -> None:
    plan, wrong = result.plan, result.wrong
    steps = dict(STEP.iter_unpack((folder / "steps").read_bytes())) if (folder / "steps").exists() else {}
    result.steps = len(steps)
    # A hidden one is a record that was just being put together: killed then, the run has none yet.
    found = (folder / "trimtab_runs").glob("*")
    runs = [path for path in found if path.is_dir() and not path.name.startswith(".")]
    result.folders = len(runs)
    number = SIGNALS[plan.name]
    # The command line itself answers an interrupt with 130, as shells do; so does a checkpoint that was asked for.
    by_number = (plan.checkpoints and plan.name == "TERM") or (plan.name == "INT" and not steps)
    usual = {-number} | ({128 + number} if by_number else set())
    if code not in usual:
        wrong.append(f"exit code {code}, expected {' or '.join(map(str, sorted(usual)))}")
    if steps and not runs:
        wrong.append(f"{len(steps)} steps were made and there is no folder")
    for path in runs:
        try:
            run = read_run(path)
        except trimtab.TrimtabError as error:
            wrong.append(f"not readable: {error}")
            continue
        if run.info is None:
            wrong.append("no opening line")
        torn = [p for p in run.problems if "incomplete" not in p]
        if torn or (run.problems and plan.name != "KILL"):
            wrong.append(f"damaged: {run.problems}")
        _look_at_the_end(result, path, steps)


def _look_at_the_end(result: Result, path: Path, steps: dict[int, float]) -> None:
    plan, wrong = result.plan, result.wrong
    run = read_run(path)
    known = {sample.step for sample in run.samples()}
    lost = sorted(step for step in steps if step not in known)
    if lost:
        result.lost_steps, result.lost_s = len(lost), max(steps.values()) - steps[lost[0]]
    if plan.name == "KILL":
        if result.lost_s > LONGEST_LOSS_S:
            wrong.append(f"{result.lost_s:.3f} s of steps are lost")
        if run.closing is not None:
            wrong.append("closed, though the process was killed")
    else:
        reason = {"INT": "KeyboardInterrupt", "TERM": "SIGTERM"}[plan.name]
        if run.closing is None:
            wrong.append("not closed")
        elif run.closing.reason != reason:
            wrong.append(f"closed with {run.closing.reason!r}, expected {reason!r}")
        if len(lost) > 1:  # the signal may come between the step and its sample
            wrong.append(f"{len(lost)} steps are lost")
    wanted = Health.UNFINISHED if plan.name == "KILL" else Health.INTERRUPTED
    if find_run(path.parent) != path or summarise(run).health is not wanted:
        wrong.append(f"reported as {summarise(run).health.value}")


def table(results: list[Result]) -> str:
    """One row per signal, moment and kind of run."""
    lines = [
        f"{'signal':<8}{'moment':<15}{'checkpoints':<13}{'sent':>5}{'folders':>9}{'wrong':>7}{'most steps lost':>17}"
        f"{'most seconds lost':>19}"
    ]
    kinds = dict.fromkeys((r.plan.moment, r.plan.name, r.plan.checkpoints) for r in results)
    for moment, name, checkpoints in kinds:
        some = [r for r in results if (r.plan.moment, r.plan.name, r.plan.checkpoints) == (moment, name, checkpoints)]
        lines.append(
            f"{name:<8}{moment:<15}{'yes' if checkpoints else 'no':<13}{len(some):>5}"
            f"{sum(r.folders for r in some):>9}{sum(bool(r.wrong) for r in some):>7}"
            f"{max(r.lost_steps for r in some):>17}{max(r.lost_s for r in some):>19.3f}"
        )
    num, wrong = sum(r.folders for r in results), sum(bool(r.wrong) for r in results)
    return "\n".join([*lines, f"{len(results)} signals, {num} records, {wrong} wrong"])


def run_all(chosen: list[Plan], jobs: int) -> list[Result]:
    """Send these signals, `jobs` at a time."""
    with tempfile.TemporaryDirectory(prefix="trimtab-signals-") as made:

        def one(numbered: tuple[int, Plan]) -> Result:
            folder = Path(made) / str(numbered[0])
            folder.mkdir()
            return send(numbered[1], folder)

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, enumerate(chosen)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # in the background they may be ignored
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    results = run_all(list(plans(given.count, given.seed)), given.jobs)
    print(table(results))
    for result in results:
        for text in result.wrong:
            print(f"  {result.plan}: {text}")
    return int(any(result.wrong for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
