"""What guarding a step costs, beside `clip_grad_norm_` and other ways to watch gradients, all in one run.

    python benchmarks/overhead.py --long --write    measures everything; writes the results file, README.md and docs
    python benchmarks/overhead.py --quick           a minute, few repetitions: shows that everything works
    python benchmarks/overhead.py --parts steps,tensors
    python benchmarks/overhead.py --parts long      100,000 steps of an MLP alone: cost per step, memory, record
    python benchmarks/overhead.py --share 0.25      a quarter of the repetitions, where time is short

Parts: `steps` (three models in steady state, all arms), `tensors` (6 to 3,000 tensors), `start` (the first 100 steps
of fresh guards), `disabled` (`TRIMTAB_DISABLE=1`), `long` (100,000 steps; only if asked for), and `gpu` (host time, by
gpu_host.py). Where there is a GPU, `gpu` is the only part by default, else all others are. The results file says how
the estimate is made; overhead_page.py makes it.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import logging
import math
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from overhead_page import (
    ATTACH,
    BARE,
    CLIP,
    GUARD,
    GUARD_CLIP,
    METHOD,
    RUN,
    STEADY,
    UNRECORDED,
    Claim,
    Model,
    Start,
    Timed,
    claims_of,
    costs,
    docs_block,
    processor_words,
    rare_share,
    readme_row,
    start_table,
    sweep_table,
    table,
    with_block,
    with_row,
)
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trimtab import Guard, __version__
from trimtab.guard.lane import STATE_EVERY
from trimtab.record.sinks import ConsoleSink
from trimtab.run.auto_guard import AutoGuard
from trimtab.sample.measure.native import native

ROOT = Path(__file__).resolve().parents[1]
GPU_SCRIPT = Path(__file__).with_name("gpu_host.py")
PARTS = ("steps", "tensors", "start", "disabled", "long", "gpu")
CYCLE = 400
"""Steps after which everything has come round that the guard does every 4, 5, 8, 10, 16, 20, 50 steps."""
SHORT_CYCLE = 100
"""The same but for every 8 and 16 steps, where steps take long."""
NUM_FIRST = 100
ITEMS, ANOMALY = "`.item()` per tensor", "`detect_anomaly`"
ALL_ARMS = (BARE, CLIP, GUARD, GUARD_CLIP, ATTACH, RUN, UNRECORDED)
FEW_ARMS = (BARE, CLIP, GUARD)
Batches = list[tuple[Tensor, Tensor]]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(x) + self.place.weight[: x.shape[1]])))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Deep(nn.Module):
    """A residual network of small layers: many tensors, few parameters."""

    def __init__(self, num_tensors: int, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(num_tensors // 2 - 1))
        self.head = nn.Linear(width, 4)
        self.scale = 1 / math.sqrt(len(self.layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.scale * torch.tanh(layer(x))
        return self.head(x)


def vectors(width: int, classes: int, batch: int = 32) -> Callable[[], tuple[Tensor, Tensor]]:
    """Noisy labels of a fixed linear teacher: labels that cannot be learned are a finding, and cost the guard more."""
    teacher = torch.randn(width, classes, generator=torch.Generator().manual_seed(5))

    def make() -> tuple[Tensor, Tensor]:
        x = torch.randn(batch, width)
        return x, (x @ teacher + 2.0 * torch.randn(batch, classes)).argmax(1)

    return make


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Sequences in which four of five tokens follow from the one before them."""

    def make() -> tuple[Tensor, Tensor]:
        row = [torch.randint(0, vocabulary, (batch, 1))]
        for _ in range(length):
            other = torch.rand(batch, 1) < 0.2
            row.append(torch.where(other, torch.randint(0, vocabulary, (batch, 1)), (row[-1] * 7 + 3) % vocabulary))
        x = torch.cat(row, 1)
        return x[:, :-1], x[:, 1:]

    return make


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its batches; `limit` is the most that a guard may cost, in units of `clip_grad_norm_`.

    An arm's turn is `block` steps: with larger models few, so that the arms run close together, but always enough for
    what the guard does every tenth of a second.
    """

    name: str
    data: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    block: int
    cycles: int
    cycle: int = CYCLE
    arms: tuple[str, ...] = ALL_ARMS
    limit: float = math.inf
    starts: int = 0


MODELS = [
    Workload(
        name="MLP",
        data="batch 32",
        make=mlp,
        batch=vectors(64, 10),
        block=50,
        cycles=30,
        arms=(*ALL_ARMS, ITEMS, ANOMALY),
        limit=1.8,
        starts=30,
    ),
    Workload(
        name="small GPT",
        data="batch 4 x 32 tokens",
        make=lambda: GPT(128, 96, 4, 4, 64),
        batch=tokens(4, 32, 128),
        block=10,
        cycles=6,
        limit=1.2,
        starts=10,
    ),
    Workload(
        name="larger GPT",
        data="batch 4 x 32 tokens",
        make=lambda: GPT(512, 256, 6, 4, 64),
        batch=tokens(4, 32, 512),
        block=5,
        cycles=2,
        limit=0.95,
        starts=5,
    ),
]


def sweep() -> list[Workload]:
    """Models of 6 to 3,000 small tensors; the largest with fewer repetitions."""
    sizes = {6: (50, 12), 30: (50, 12), 100: (25, 8), 300: (10, 4), 1_000: (5, 4), 3_000: (5, 3)}
    return [
        Workload(
            name=f"{num:,} tensors",
            data="batch 32",
            make=lambda num=num: Deep(num),  # type: ignore[misc]
            batch=vectors(16, 4),
            block=block,
            cycles=cycles,
            cycle=CYCLE if num < 1_000 else SHORT_CYCLE,
            arms=FEW_ARMS,
        )
        for num, (block, cycles) in sizes.items()
    ]


@contextmanager
def changed_environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@dataclass
class Arm:
    """One way of stepping, with its own model."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], object]
    guard: Guard | None = None
    auto: AutoGuard | None = None
    num_steps: int = 0
    main: list[float] = field(default_factory=list)
    background: list[float] = field(default_factory=list)
    rare: list[float] = field(default_factory=list)

    def run(self, batches: Batches, timings: bool = True) -> list[float]:
        """Train on a block of batches: the main thread's µs of each step; kept as one block where `timings` is set."""
        each = []
        if self.auto is not None:
            self.auto.start()  # only in its own turns: its hooks on classes would slow all other arms down
        with torch.autograd.set_detect_anomaly(self.name == ANOMALY):
            whole, mine = time.process_time(), time.thread_time()
            for x, y in batches:
                start = time.thread_time()
                loss = F.cross_entropy(self.model(x).flatten(0, -2), y.flatten())
                loss.backward()
                self.step(loss)
                self.optimizer.zero_grad()
                each.append(1e6 * (time.thread_time() - start))
            self._wait_for_records()
            behind = 1e6 * (time.process_time() - whole - (time.thread_time() - mine))
        if self.auto is not None:
            self.auto.stop_watching()
        if timings:
            usual = [us for i, us in enumerate(each, self.num_steps + 1) if i % STATE_EVERY]
            self.rare += [us for i, us in enumerate(each, self.num_steps + 1) if i % STATE_EVERY == 0]
            self.main.append(statistics.fmean(usual))
            self.background.append(behind / len(batches))
        self.num_steps += len(batches)
        return each

    def _wait_for_records(self) -> None:
        """So that the cost of writing is that of this arm. Not `Guard.flush`: it does work that steps have put off."""
        trainings = [] if self.auto is None else self.auto.trainings
        for recorder in (None if self.guard is None else self.guard.recorder, *(t.recorder for t in trainings)):
            if recorder is not None:
                recorder.flush()

    def timed(self, places: int) -> Timed:
        rare = rare_share(self.main, self.rare, STATE_EVERY) if self.guard is not None or self.auto is not None else 0
        return Timed(
            name=self.name,
            main=np.array(self.main).reshape(-1, places),
            background=np.array(self.background).reshape(-1, places),
            rare=rare,
        )

    def close(self) -> tuple[str, ...]:
        """End it; returns what was found, which should be nothing."""
        if self.auto is not None:
            found = tuple(sorted({code for training in self.auto.trainings for code in training.codes}))
            self.auto.finish()
            return found
        if self.guard is None:
            return ()
        self.guard.close()
        return tuple(sorted({finding.name for finding in self.guard.findings}))


def item_by_item(model: nn.Module) -> None:
    """Seven statistics a parameter, each fetched on its own: what programs that watch gradients often do."""
    for p in model.parameters():
        if (g := p.grad) is not None:
            g.norm().item(), g.mean().item(), g.std().item(), g.max().item(), g.min().item()
            g.isnan().any().item(), g.isinf().any().item()


def arm_of(workload: Workload, name: str, folder: Path) -> Arm:
    auto = None
    if name == RUN:
        # What the command does in each step. Its handling of signals and child processes costs no step anything.
        settings = {"run_dir": folder / "run"}
        auto = AutoGuard(settings, lambda training: None, sinks=lambda: [ConsoleSink(stream=sys.stderr)])
        auto.start()
    torch.manual_seed(0)
    model = workload.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if auto is not None:
        auto.stop_watching()

    def plain(loss: Tensor) -> None:
        optimizer.step()

    def clipped(loss: Tensor) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def item(loss: Tensor) -> None:
        item_by_item(model)
        optimizer.step()

    if name in (GUARD, GUARD_CLIP, UNRECORDED, ATTACH):
        run_dir: Any = False if name == UNRECORDED else folder / name.strip("`")
        make = Guard.attach if name == ATTACH else Guard
        guard = make(model, optimizer, clip=1.0 if name == GUARD_CLIP else None, run_dir=run_dir)
        return Arm(name, model, optimizer, plain if name == ATTACH else guard.step, guard=guard)
    return Arm(name, model, optimizer, {CLIP: clipped, ITEMS: item}.get(name, plain), auto=auto)


def take_turns(arms: Sequence[Arm], workload: Workload, num_steps: int, *, timings: bool) -> None:
    for _ in range(num_steps // workload.block):
        batches = [workload.batch() for _ in range(workload.block)]
        for arm in random.sample(arms, len(arms)):
            arm.run(batches, timings)


@contextmanager
def frozen() -> Iterator[None]:
    """Keep what exists out of garbage collections: they would grow with the number of arms."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(workload: Workload, cycles: int, cycle: int, parent: Path) -> Model:
    folder = parent / workload.name
    arms = [arm_of(workload, name, folder) for name in workload.arms]
    torch.manual_seed(1)
    take_turns(arms, workload, STEADY, timings=False)
    with frozen():
        take_turns(arms, workload, cycles * cycle, timings=True)
    found = costs([arm.timed(cycle // workload.block) for arm in arms])
    model = arms[0].model
    return Model(
        name=workload.name,
        num_params=sum(p.numel() for p in model.parameters()),
        num_tensors=sum(1 for _ in model.parameters()),
        data=f"{workload.data}, AdamW",
        blocks=f"{cycles} cycles of {cycle} steps, in blocks of {workload.block}",
        found=found,
        findings={arm.name: arm.close() for arm in arms},
    )


# -- the other parts -------------------------------------------------------------------------------------------------


def measure_start(workload: Workload, times: int, parent: Path, steady: Model | None) -> Start:
    """The first 100 steps, with a fresh model, optimizer and guard each time."""
    each: dict[str, list[list[float]]] = {name: [] for name in FEW_ARMS}
    build_s: dict[str, list[float]] = {name: [] for name in FEW_ARMS}
    torch.manual_seed(1)
    for i in range(times + 1):
        batches = [workload.batch() for _ in range(NUM_FIRST)]
        for name in random.sample(FEW_ARMS, len(FEW_ARMS)):
            gc.collect()
            began = time.thread_time()
            arm = arm_of(workload, name, parent / f"{workload.name}-{i}")
            build_s[name].append(time.thread_time() - began)
            each[name].append(arm.run(batches))
            arm.close()

    def cost(first: int, end: int) -> Any:
        # The first repetition also imports and compiles.
        means = {name: np.array(rows)[1:, first:end].mean(axis=1, keepdims=True) for name, rows in each.items()}
        return costs([Timed(name=name, main=us, background=np.zeros_like(us)) for name, us in means.items()])[GUARD]

    adds = None if steady is None else steady.found[GUARD].adds_us - steady.found[GUARD].background_us
    build_ms = 1e3 * (statistics.median(build_s[GUARD]) - statistics.median(build_s[BARE]))
    return Start(
        name=workload.name,
        build_ms=build_ms,
        first=cost(0, 1),
        early=cost(1, 61),
        late=cost(61, NUM_FIRST),
        steady_us=adds,
    )


def measure_disabled(rounds: int, calls: int = 500) -> float:
    """What `Guard.step` adds to `optimizer.step()` where TRIMTAB_DISABLE is set, in µs per call."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # without gradients its step is the shortest there is
    with changed_environment("TRIMTAB_DISABLE", "1"):
        guard = Guard(model, optimizer, run_dir=False)
    loss = torch.zeros(())
    times: dict[bool, list[float]] = {True: [], False: []}
    for i in range(rounds):
        for guarded in (True, False) if i % 2 else (False, True):
            start = time.thread_time()
            if guarded:
                for _ in range(calls):
                    guard.step(loss)
            else:
                for _ in range(calls):
                    optimizer.step()
            times[guarded].append(1e6 * (time.thread_time() - start) / calls)
    guard.close()
    guarded_us, bare_us = (np.quantile(times[guarded], 1 / 7) for guarded in (True, False))
    return float(guarded_us - bare_us)


def functions_entered(workload: Workload) -> tuple[int, int]:
    """How many Python functions of ours an ordinary step enters: inside `Guard.step`, and with all hooks."""
    arm = arm_of(workload, UNRECORDED, Path())
    ours, counts, inside = str(Path(sys.modules["trimtab"].__file__ or "").parent), [], []
    num = 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal num
        num += event == "call" and frame.f_code.co_filename.startswith(ours)

    def step(loss: Tensor) -> None:
        before = num
        assert arm.guard is not None
        arm.guard.step(loss)
        inside.append(num - before)

    arm.run([workload.batch() for _ in range(STEADY)], timings=False)
    arm.step = step
    for _ in range(50):
        num, batch = 0, [workload.batch()]
        sys.setprofile(count)
        arm.run(batch, timings=False)
        sys.setprofile(None)
        counts.append(num)
    arm.close()
    return int(statistics.median(inside)), int(statistics.median(counts))


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def measure_long(num_steps: int, cycles: int, parent: Path) -> tuple[list[str], list[Claim]]:
    """A guard that has seen many steps, beside a fresh one and the unguarded arm, all at the same time."""
    workload = MODELS[0]
    old = arm_of(workload, GUARD, parent / "long")
    torch.manual_seed(1)
    rows, memory = [], {}
    marks = sorted({1_000, num_steps // 10, num_steps // 2, num_steps})
    for _ in range(num_steps // workload.block):
        take_turns([old], workload, workload.block, timings=False)
        if old.num_steps in marks:
            gc.collect()
            memory[old.num_steps] = resident_mb()
            size = sum(f.stat().st_size for f in (parent / "long" / GUARD).rglob("*") if f.is_file()) / 1e6
            rows.append((f"{old.num_steps:,}", f"{memory[old.num_steps]:,.1f}", f"{size:,.2f}"))
    fresh, bare = arm_of(workload, GUARD, parent / "fresh"), arm_of(workload, BARE, parent)
    take_turns([fresh, bare], workload, 1_000, timings=False)
    old.name = f"Guard, after {num_steps:,} steps"
    arms = [bare, fresh, old]
    with frozen():
        take_turns(arms, workload, cycles * CYCLE, timings=True)
    found = costs([arm.timed(CYCLE // workload.block) for arm in arms])
    young, aged = found[GUARD], found[old.name]
    findings = {name for arm in arms for name in arm.close()}
    grown = memory[num_steps] - memory[marks[1]]
    steps = [
        (
            name,
            f"{c.step_us:,.0f}",
            f"{c.adds_us:+,.0f} ({c.low_us:+,.0f} to {c.high_us:+,.0f})",
            f"{c.paired_us:+,.0f}",
        )
        for name, c in found.items()
    ]
    steps[1] = ("Guard, after 1,000 steps", *steps[1][1:])
    text = [
        f"## A run of {num_steps:,} steps",
        f"MLP; an old guard beside a fresh one, in turns, {cycles} cycles of {CYCLE} steps.",
        table(("arm", "step µs", "adds µs per step", "paired"), steps),
        table(("after step", "memory of the process MB", "record MB"), rows),
        *([f"Findings: {', '.join(sorted(findings))}."] if findings else []),
    ]
    whole = 100 * (aged.step_us / young.step_us - 1)
    added = 100 * (aged.adds_us / young.adds_us - 1)
    return text, [
        Claim(what=f"whole step after {num_steps:,} steps, more than after 1,000", value=whole, limit=5, unit=" %"),
        Claim(
            what=f"what Guard adds after {num_steps:,} steps, more than after 1,000", value=added, limit=5, unit=" %"
        ),
        Claim(what=f"memory gained after step {marks[1]:,}", value=grown, limit=5, unit=" MB"),
    ]


def gpu_report(quick: bool, script: Path = GPU_SCRIPT) -> str:
    """Host time of a step on the GPU: another script measures it, and prints a table."""
    done = subprocess.run([sys.executable, script, *(["--quick"] if quick else [])], capture_output=True, text=True)
    sys.stderr.write(done.stderr)
    if done.returncode:
        raise SystemExit(f"{script.name} ended with exit code {done.returncode}")
    title = f"## Host time of a step on {torch.cuda.get_device_name()}"
    return f"{title}\n\nBy `python benchmarks/gpu_host.py`, which says how.\n\n{done.stdout.strip()}"


# -- the report ------------------------------------------------------------------------------------------------------


def processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = [line.split(":", 1) for line in info.read_text().splitlines() if ":" in line] if info.exists() else []
    found = {name.strip(): value.strip() for name, value in lines}
    name = found.get("model name", platform.machine())
    return name if "GHz" in name or "cpu MHz" not in found else f"{name} @ {float(found['cpu MHz']) / 1e3:.2f}GHz"


def current_commit() -> str:
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"


def header(commit: str) -> str:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    read_by = "NumPy and PyTorch" if native is None else "the compiled module"
    return (
        f"# What a guarded step costs\n\ntrimtab {__version__} at {commit}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {where}, {os.cpu_count()} cores, one torch thread; "
        f"healthy steps are read by {read_by}.\n\n"
        f"Command: `{' '.join(['python benchmarks/overhead.py', *sys.argv[1:]])}`."
    )


def results_file() -> Path:
    kind = f"cpu{os.cpu_count()}"
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        found = re.search(r"\b[A-Z]+\d+\w*", name)
        kind = (found[0] if found else name.replace(" ", "-")).lower()
    return ROOT / f"benchmarks/results/overhead_{kind}_{datetime.date.today():%Y-%m-%d}.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=lambda text: text.split(","), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true", help="few repetitions of short cycles")
    parser.add_argument("--models", type=lambda text: text.split(","), help="only these of the models of `steps`")
    parser.add_argument("--share", type=float, default=1.0, help="share of the repetitions, at least two of each")
    parser.add_argument("--long", action="store_true", help="also a run of 100,000 steps")
    parser.add_argument("--commit", help="what to write as the commit, outside of a checkout")
    parser.add_argument("--out", type=Path, help="write the results here")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results, README.md and docs")
    args = parser.parse_args()
    parts = args.parts or (["gpu"] if torch.cuda.is_available() else ["steps", "tensors", "start", "disabled"])
    parts += ["long"] if args.long and "long" not in parts else []
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}; expected some of {', '.join(PARTS)}")
    if not 0 < args.share <= 1:
        parser.error(f"--share is {args.share}; expected a number above 0 and at most 1")
    if args.models is not None and (unknown := set(args.models) - {m.name for m in MODELS}):
        parser.error(
            f"unknown models: {', '.join(sorted(unknown))}; expected some of {', '.join(m.name for m in MODELS)}"
        )
    if args.write and args.models is not None:
        parser.error("README.md and docs show all models; leave out --models or --write")
    if args.write and args.quick:
        parser.error("figures of a quick run are not for README.md and docs; leave out --quick or --write")
    if args.write and set(parts) != {"gpu"} and not {"steps", "tensors", "start"} <= set(parts):
        parser.error("README.md and docs show the parts steps, tensors and start: measure all of them to write them")
    if args.write and args.out is not None and not args.out.resolve().is_relative_to(ROOT):
        parser.error(f"README.md and docs quote a file of this repository; expected --out below {ROOT}")
    torch.set_num_threads(1)
    random.seed(0)
    logging.getLogger("trimtab").setLevel(logging.CRITICAL)
    out = args.out or (results_file() if args.write else None)
    begin = header(args.commit or current_commit())
    with tempfile.TemporaryDirectory() as folder:
        models = [m for m in MODELS if args.models is None or m.name in args.models]
        report(parts, begin, Path(folder), models, quick=args.quick, share=args.share, out=out, write=args.write)


def repetitions(workload: Workload, share: float) -> tuple[int, int]:
    """How many cycles of how many steps; of fewer, those of large models are short."""
    if share == 1:
        return workload.cycles, workload.cycle
    return max(round(share * workload.cycles), 2), workload.cycle if workload.block >= 10 else SHORT_CYCLE


def report(
    parts: Sequence[str],
    begin: str,
    folder: Path,
    wanted: Sequence[Workload] = MODELS,
    *,
    quick: bool,
    out: Path | None,
    write: bool,
    share: float = 1.0,
) -> None:
    """Measure, print, and write what is to be written."""
    text, claims = [begin, *([METHOD] if set(parts) - {"gpu"} else [])], list[Claim]()
    models, sizes, starts = list[Model](), list[Model](), list[Start]()

    def done(what: str) -> None:
        print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr, flush=True)

    def measured(workload: Workload) -> Model:
        cycles, cycle = (2, 50) if quick else repetitions(workload, share)
        model = measure(workload, cycles, cycle, folder)
        done(model.title)
        return model

    if "steps" in parts:
        models = [measured(w) for w in (wanted[:2] if quick else wanted)]
        inside, whole = functions_entered(MODELS[0])
        claims += [c for m, w in zip(models, wanted, strict=False) for c in claims_of(m.name, m.found, w.limit)]
        text += ["## Steady state", *(model.section() for model in models)]
        text += [f"An ordinary `Guard.step` enters {inside} Python functions of trimtab; with its hooks, {whole}."]
    if "tensors" in parts:
        sizes = [measured(w) for w in (sweep()[:2] if quick else sweep())]
        told = f"Layers of 16 x 16. From 1,000 tensors on the cycle is {SHORT_CYCLE} steps, else {CYCLE}."
        text += ["## By the number of tensors", told, sweep_table(sizes)]
        text += [f"Findings at {m.name}: {m.findings}." for m in sizes if any(m.findings.values())]
    if "start" in parts:
        steady: dict[str, Model] = {model.name: model for model in models}
        for workload in MODELS[:2] if quick else MODELS:
            times = 1 if quick else max(round(share * workload.starts), 2)
            starts.append(measure_start(workload, times, folder, steady.get(workload.name)))
            done(f"{workload.name}, first steps")
        told = "Main thread only, in a process that has trained before; a fresh model, optimizer and guard each time."
        text += ["## The first 100 steps", told, start_table(starts)]
        claims += [
            Claim(what=f"{s.name}: steps 1 to 60 against the steady state", value=s.ratio, limit=1.5, unit="x")
            for s in starts
            if s.steady_us is not None
        ]
        claims.append(Claim(what="small GPT: step 0", value=starts[1].first.adds_us / 1e3, limit=3, unit=" ms"))
    if "disabled" in parts:
        us = measure_disabled(20 if quick else max(round(300 * share), 20))
        text += ["## Switched off", f"With `TRIMTAB_DISABLE=1` a call of `Guard.step` adds {us:.2f} µs."]
        claims.append(Claim(what="`TRIMTAB_DISABLE=1`, a call", value=us, limit=2, unit=" µs"))
    if "long" in parts:
        more, limits = measure_long(2_000 if quick else 100_000, 1 if quick else 8, folder)
        text, claims = text + more, claims + limits
    if "gpu" in parts:
        text.append(gpu_report(quick))
    if quick:
        text.append("This was a quick run: its figures show only that everything works.")
    elif claims:
        text += ["## Limits", "\n".join(claim.line() for claim in claims)]
    page = "\n\n".join(part.strip() for part in text) + "\n"
    print(page)
    if out is not None:
        out.write_text(page, encoding="utf-8")
    if write and models and out is not None:
        write_pages(models, sizes, starts, out.resolve().relative_to(ROOT).as_posix())


def write_pages(models: Sequence[Model], sizes: Sequence[Model], starts: Sequence[Start], source: str) -> None:
    """Put the figures into README.md and docs."""
    words = processor_words(processor())
    readme, docs = ROOT / "README.md", ROOT / "docs/explanation/performance.md"
    readme.write_text(with_row(readme.read_text("utf-8"), readme_row(models, words)), encoding="utf-8")
    block = docs_block(models, sizes, starts, words, source)
    docs.write_text(with_block(docs.read_text("utf-8"), block), encoding="utf-8")


if __name__ == "__main__":
    main()
