"""Whether a guard finds on a GPU what it finds on a CPU: every fault and every healthy look-alike, run on both.

    PYTHONPATH=src python benchmarks/gpu_parity.py [--out FILE.md] [--workers 14] [--seconds 110] [--arms cpu,cuda]

Weights and data of a run are made on the host, from the same seed, and then moved; the masks of dropout and other noise
are drawn there, too. So both arms train the same program on the same numbers, to rounding. Runs are made in mode
observe. What is compared are pairs of a run and the name of a finding: a pair is equal where both arms have it. Half of
the runs use the fused form of their optimizer, where there is one: those decide on the device, without any wait.

What rules read, where it comes from on a CPU, and how it gets to the host from a GPU:

- Norms of gradients, clipping, rejecting: read in the step. GPU: kernels, in the step; known to the host `lag` later.
- All columns of gradients: every `full_every` steps, and at once where a norm looks wrong. GPU: every step.
- Weights and moments that others changed, NaN in them, update ratio, second moments: compared before and after each
  step. GPU: the same elements are compared on the device, sent, and looked at by the same code when the step is due.
- Lost state, counts of steps: read in the step. GPU: Python's part in the step; counts on the device with the moments.
- All weights and updates: every `full_every` steps, and at once where a norm looks wrong. GPU: for a fused optimizer it
  is the step after the one that is known to look wrong.
- Size of a batch, NaN in it: read in the forward. GPU: kernels; of further inputs and of targets sums on the device.
- Fingerprint of a batch, place in the epoch: read in the forward. GPU: its beginning is sent, and read when due.
- Samples that are all equal: compared where they begin alike. GPU: on the device, where those of the last batch that is
  due began alike: two steps later.
- Range, classes and chance level of targets: read when told. GPU: their beginning is sent (floats: 16,384 numbers).
- Spread of outputs and towers, every tenth step: read. GPU: summed on the device.
- Scale and sign of the loss, now and then: from the gradient at the output. GPU: three numbers of 32 rows are sent.
- Temperature, averaged weights: read. GPU: sent, and read when due.
- Buffers gone bad: read in the step. GPU: their norms; for a fused optimizer the finding does not name the buffer.
- What a gradient is made of: products on the host. GPU: products on the device.
- Labels out of range: the exception says so. GPU: an assertion in a kernel, which does not say what failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import queue
import sys
import time
import traceback
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

LEAST_SHARE = 0.98
KEPT: list[object] = []
SIMULATED = "simulated"
"""The way of a device, with tensors of the host."""
DEADLY = ("label-out-of-range", "label-negative", "token-out-of-vocabulary")
"""An assertion in a kernel ends all use of the device by its process: another one takes its place."""


@dataclass(frozen=True)
class Job:
    """One run to be made on both devices."""

    case: str
    healthy: bool
    family: str
    seed: int
    fused: bool

    @property
    def name(self) -> str:
        return f"{self.case} {self.family} {self.seed}{' fused' if self.fused else ''}"


@dataclass
class Made:
    """What one arm of a run gave."""

    job: Job
    arm: str
    findings: list[tuple[str, int, str]]
    error: str
    troubles: list[str]
    seconds: float
    last_loss: float


def jobs() -> list[Job]:
    """Each fault on two families, each healthy case on one: plain and fused optimizers, all families alike."""
    from tests.faults.faults import FAULTS
    from tests.faults.healthy import HEALTHY

    out: list[Job] = []
    used: Counter[str] = Counter()
    for healthy, cases in ((False, FAULTS), (True, HEALTHY)):
        for i, case in enumerate(cases.values()):
            for second in (False, True) if not healthy else (i % 2 == 1,):
                free = sorted(case.families, key=lambda family: used[family])
                family = free[min(int(second), len(free) - 1)]
                used[family] += 1
                out.append(Job(case.name, healthy, family, 100 + i, second))
    return sorted(out, key=lambda job: (job.case not in DEADLY, job.healthy and job.seed % 2 == 1))


class Logged(logging.Handler):
    """Keeps what trimtab says went wrong inside of it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.ERROR:
            told = "".join(traceback.format_exception(record.exc_info[1])[-3:]) if record.exc_info else ""
            self.lines.append(f"{record.getMessage()} {told}")


def same_chance() -> None:
    """Draw noise on the host, whatever device it is for, so that both arms get the same."""

    def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return input
        keep = (torch.rand(input.shape) >= p).to(input.device)
        return torch.where(keep, input / max(1.0 - p, 1e-12), torch.zeros((), dtype=input.dtype, device=input.device))

    def randn_like(input: Tensor, **options: Any) -> Tensor:
        return torch.randn(input.shape, dtype=input.dtype).to(input.device)

    torch.backends.cudnn.allow_tf32 = False  # on by default: its convolutions would round to ten bits
    F.dropout = dropout  # type: ignore[assignment]
    torch.randn_like = randn_like  # type: ignore[assignment]


def make(job: Job, arm: str) -> Made:
    """One arm of a run."""
    from tests.faults import harness
    from tests.faults.faults import FAULTS
    from tests.faults.healthy import HEALTHY
    from tests.simulated_device import simulated_device

    heard, log = Logged(), logging.getLogger("trimtab")
    log.addHandler(heard)
    log.propagate = False
    began = time.perf_counter()
    findings: list[tuple[str, int, str]] = []
    error, last = "", float("nan")
    case = (HEALTHY if job.healthy else FAULTS)[job.case]
    try:
        with simulated_device() if arm == SIMULATED else nullcontext():
            device = "cpu" if arm == SIMULATED else arm
            run = harness.run_case(case, job.family, job.seed, device=device, fused=job.fused)
        if job.case in DEADLY:
            KEPT.append(run)
        error = repr(run.extra.get("error", ""))[:200]
        last = run.losses[-1] if run.losses else last
        if run.guard is not None:
            findings = [(f.name, f.step, f.message[:160]) for f in run.guard.findings]
    except Exception:
        error = "not run: " + traceback.format_exc(limit=-4)
    log.removeHandler(heard)
    return Made(job, arm, findings, error, heard.lines, time.perf_counter() - began, last)


def settled(model: nn.Module) -> None:
    """Attention drops out inside of a kernel, where no mask can be given: it does not here."""
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0


def work(todo: Any, done: Any, arms: tuple[str, ...]) -> None:
    """A process that makes runs until there are none left, or until its device fails."""
    torch.set_num_threads(1)
    torch.backends.cudnn.enabled = False  # its recurrent layers refuse a backward pass in evaluation mode
    same_chance()
    from tests.faults import families

    for name, build in list(families.FAMILIES.items()):

        def built(seed: int, build: Any = build) -> Any:
            task = build(seed)
            settled(task.model)
            return task

        families.FAMILIES[name] = built
    while True:
        try:
            job = todo.get(timeout=1.0)
        except queue.Empty:
            return
        for arm in arms:
            done.put(asdict(make(job, arm)))
        if "cuda" in arms and job.case in DEADLY:
            done.close()
            done.join_thread()
            os._exit(0)  # PyTorch aborts where pinned memory is given back after such a failure


def run_all(found: list[Job], workers: int, seconds: float, arms: tuple[str, ...]) -> list[dict[str, Any]]:
    """Make all runs side by side; what is not done in time is left out."""
    context = multiprocessing.get_context("spawn")
    todo, done = context.Queue(), context.Queue()
    for job in found:
        todo.put(job)
    processes = [context.Process(target=work, args=(todo, done, arms), daemon=True) for _ in range(workers)]
    for process in processes:
        process.start()
    out: list[dict[str, Any]] = []
    replaced = 0
    until = time.monotonic() + seconds
    while len(out) < len(arms) * len(found) and time.monotonic() < until:
        try:
            one = done.get(timeout=2.0)
        except queue.Empty:
            if not any(p.is_alive() for p in processes):
                break
            continue
        if one is not None:
            out.append(one)
        lost = sum(not p.is_alive() for p in processes) - replaced
        for _ in range(lost if len(out) < len(arms) * len(found) - lost and time.monotonic() < until - 15 else 0):
            replaced += 1  # its device was lost: another takes its place
            processes.append(context.Process(target=work, args=(todo, done, arms), daemon=True))
            processes[-1].start()
    for process in processes:
        process.terminate()
    return out


def first_steps(made: dict[str, Any]) -> dict[str, int]:
    """By the name of a finding, the step of the first."""
    out: dict[str, int] = {}
    for name, step, _ in made["findings"]:
        out[name] = min(step, out.get(name, step))
    return out


def compare(results: list[dict[str, Any]], device: str) -> tuple[str, float, int]:
    """The report, the share of equal pairs, and how many runs it is made of."""
    by: dict[str, dict[str, dict[str, Any]]] = {}
    for made in results:
        by.setdefault(Job(**made["job"]).name, {})[made["arm"]] = made
    both = {n: arms for n, arms in by.items() if {"cpu", device} <= arms.keys()}
    unable = [n for n, arms in both.items() if any(m["error"].startswith("not run") for m in arms.values())]
    equal: Counter[str] = Counter()
    alone: dict[str, Counter[str]] = {"cpu": Counter(), device: Counter()}
    lags: Counter[int] = Counter()
    lines = []
    for name, arms in sorted(both.items()):
        if name in unable:
            continue
        cpu, gpu = first_steps(arms["cpu"]), first_steps(arms[device])
        for finding in cpu.keys() & gpu.keys():
            equal[finding] += 1
            lags[gpu[finding] - cpu[finding]] += 1
        for arm, mine, other in (("cpu", cpu, gpu), (device, gpu, cpu)):
            for finding in sorted(mine.keys() - other.keys()):
                alone[arm][finding] += 1
                lines.append(f"- {name}: {finding} (step {mine[finding]}) on {arm} alone")
    num_equal, num_alone = sum(equal.values()), sum(sum(c.values()) for c in alone.values())
    share = num_equal / max(num_equal + num_alone, 1)
    names = sorted(equal.keys() | alone["cpu"].keys() | alone[device].keys())
    table = ["| finding | both | CPU alone | GPU alone |", "|---|---|---|---|"]
    table += [f"| {n} | {equal[n]} | {alone['cpu'][n]} | {alone[device][n]} |" for n in names]
    num_runs = len(both) - len(unable)
    silent = sum(not first_steps(a["cpu"]) and not first_steps(a[device]) for n, a in both.items() if n not in unable)
    spread = ", ".join(f"{lag:+d}: {num}" for lag, num in sorted(lags.items()))
    head = [
        f"{num_runs} runs of {len({Job(**m['job']).case for m in results})} cases, {silent} of them without a finding "
        f"on either device. {num_equal} of {num_equal + num_alone} pairs of a run and a finding are equal: "
        f"{share:.1%}. Not run: {len(unable)}.",
        "",
        f"Steps by which the GPU's finding is about a later step (its count): {spread}.",
        "",
        *table,
        "",
        "Pairs that differ:",
        "",
        *lines,
    ]
    return "\n".join(head), share, num_runs


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--raw", type=Path, help="where to keep everything that was found, as JSON")
    parser.add_argument("--also", type=Path, help="arms that were made elsewhere, as `--raw` kept them")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--arms", default="cpu,cuda", help="cpu, and others to compare with it: cuda, simulated")
    parser.add_argument("--only", default="", help="parts of names of runs, separated by commas")
    options = parser.parse_args()
    found = [job for job in jobs() if any(part in job.name for part in options.only.split(","))]
    began = time.monotonic()
    arms = tuple(options.arms.split(","))
    results = run_all(found, options.workers, options.seconds, arms)
    if options.raw is not None:
        options.raw.write_text(json.dumps(results))
    if options.also is not None:
        results += json.loads(options.also.read_text())
    for arm in arms[1:-1]:
        print(f"{arm}\n\n{compare(results, arm)[0]}\n")
    text, share, num_runs = compare(results, arms[-1])
    troubles = Counter(line.splitlines()[0][:200] for made in results for line in made["troubles"])
    print(text)
    for line, num in troubles.most_common(20):
        print(f"trouble x{num}: {line}")
    for made in results:
        if made["error"].startswith("not run"):
            print(Job(**made["job"]).name, made["arm"], made["error"][-300:].replace("\n", " | "))
    print(f"{len(results)} of {len(arms) * len(found)} arms made in {time.monotonic() - began:.0f} s")
    if options.out is not None:
        options.out.write_text(page(text))
    return 0 if share >= LEAST_SHARE and num_runs >= 150 else 1


def page(text: str) -> str:
    """The results file."""
    from trimtab import __version__

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        "# The same findings on a GPU as on a CPU\n\n"
        f"trimtab {__version__}, {card}, torch {torch.__version__}, Python {sys.version.split()[0]}. Command: "
        "`PYTHONPATH=src python benchmarks/gpu_parity.py --out FILE`. Mode observe; weights, data and noise are drawn "
        f"on the host and moved.\n\n{text}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
