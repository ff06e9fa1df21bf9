"""What a guarded step costs the host on a GPU, beside `clip_grad_norm_`: the time until a step is handed to the device.

    PYTHONPATH=src python benchmarks/gpu_host.py [--quick] [--fused] [--only "MLP 9k"] [--parts] [--out FILE]

Every arm trains its own copy of the same model on the same batches, in blocks of ten steps in changing order. The
device is idle before each step, so that a step's time is what the host spends on it: forward, backward, the guard's
hooks in both, and everything behind them. The first 100 steps of each arm are left out. What an arm adds is the
difference to the bare arm's block on the same batches: of the medians of both blocks (an ordinary step), and of their
means (with the work of every 10th, 20th and 50th step). Reported are the median over all blocks, and the mean of five
means: one in five blocks holds a full scan, so each fifth of them is averaged by itself, without its outer tenths (at
least one block on either side). `--parts` prints where the time of a guarded step goes instead.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from overhead import GPT, mlp
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trimtab import Guard, __version__

BLOCK, WARM_BLOCKS = 10, 10
CYCLE = 5
"""Blocks from one full scan to the next."""
ARMS = ("bare", "clip_grad_norm_", "guard", "guard, clip=1.0")


@dataclass
class Workload:
    """A model and its batches."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    blocks: int


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Something can be learned from them: where nothing can be, a finding says so, and costs more than silence."""

    def make() -> tuple[Tensor, Tensor]:
        first, places = torch.randint(0, vocabulary, (batch, 1), device="cuda"), torch.arange(length + 1, device="cuda")
        noise = torch.randint(0, vocabulary, (batch, length + 1), device="cuda")
        x = torch.where(torch.rand(batch, length + 1, device="cuda") < 0.2, noise, (first + 3 * places) % vocabulary)
        return x[:, :-1].contiguous(), x[:, 1:].contiguous()

    return make


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 64, device="cuda")
    return x, (x[:, :10] + 0.5 * torch.randn(32, 10, device="cuda")).argmax(1)


WORKLOADS = [
    Workload("MLP 9k", mlp, rows, 60),
    Workload("nanoGPT 10.7M", lambda: GPT(65, 384, 6, 6, 256), tokens(8, 256, 65), 25),
    Workload("GPT-2 small", lambda: GPT(50257, 768, 12, 12, 256), tokens(2, 256, 50257), 20),
]


@dataclass
class Arm:
    """One way of stepping, with its own model."""

    name: str
    model: nn.Module
    called: Any
    optimizer: torch.optim.Optimizer
    step: Callable[[Tensor], object]
    guard: Guard | None = None
    blocks_s: list[list[float]] = field(default_factory=list)


def arm_of(name: str, workload: Workload, *, compiled: bool, fused: bool | None, folder: Path) -> Arm:
    torch.manual_seed(0)
    model = workload.make().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    called = torch.compile(model) if compiled else model
    if name.startswith("guard"):
        place = folder / f"{workload.name}-{compiled}-{fused}-{name}".replace(" ", "")
        guard = Guard(model, optimizer, run_dir=place, clip=1.0 if "clip" in name else None)
        return Arm(name, model, called, optimizer, guard.step, guard)

    def step(loss: Tensor) -> None:
        if name == "clip_grad_norm_":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Arm(name, model, called, optimizer, step)


def run_block(arm: Arm, data: list[tuple[Tensor, Tensor]]) -> list[float]:
    out = []
    for x, y in data:
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = F.cross_entropy(arm.called(x).flatten(0, -2), y.flatten())
        loss.backward()
        arm.step(loss)
        arm.optimizer.zero_grad()
        out.append(time.perf_counter() - start)
    return out


@dataclass
class Row:
    """The figures of one model, one way of running it and one optimizer, in µs."""

    name: str
    bare: float
    usual: dict[str, float]  # what each arm adds to an ordinary step
    mean: dict[str, float]  # and to all steps

    def line(self) -> str:
        """One line of the table."""
        ratios = [f"{of[arm] / of[ARMS[1]]:.2f}x" for arm in ARMS[2:] for of in (self.usual, self.mean)]
        added = [f"{self.usual[arm]:+.0f}, {self.mean[arm]:+.0f}" for arm in ARMS[1:]]
        return f"| {self.name} | {self.bare:.0f} | {' | '.join(added)} | {' | '.join(ratios)} |"


def middle(values: list[float]) -> float:
    """The mean without the outer tenths, one value on either side at least."""
    cut = max(len(values) // 10, len(values) > 2)
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def measure(workload: Workload, *, compiled: bool, fused: bool | None, blocks: int, folder: Path) -> Row:
    arms = [arm_of(name, workload, compiled=compiled, fused=fused, folder=folder) for name in ARMS]
    for i in range(WARM_BLOCKS + blocks):
        data = [workload.batch() for _ in range(BLOCK)]
        order = arms[:]
        random.Random(i).shuffle(order)
        for arm in order:
            arm.blocks_s.append(run_block(arm, data))
    for arm in arms:
        del arm.blocks_s[:WARM_BLOCKS]
        if arm.guard is not None:
            arm.guard.close()
    usual, mean = {}, {}
    for arm in arms[1:]:
        pairs = list(zip(arm.blocks_s, arms[0].blocks_s, strict=True))
        usual[arm.name] = statistics.median(statistics.median(a) - statistics.median(b) for a, b in pairs) * 1e6
        added = [statistics.fmean(a) - statistics.fmean(b) for a, b in pairs]
        mean[arm.name] = statistics.fmean(middle(added[i::CYCLE]) for i in range(min(CYCLE, len(added)))) * 1e6
    way = f"{'compiled' if compiled else 'eager'}, {'fused' if fused else 'default'} AdamW"
    bare = statistics.median(statistics.median(b) for b in arms[0].blocks_s) * 1e6
    return Row(f"{workload.name}, {way}", bare, usual, mean)


HEAD = (
    "| model | bare step | `clip_grad_norm_` adds | guard adds | guard, clip=1.0 adds | "
    "guard over clipping: ordinary | all | guard, clip=1.0: ordinary | all |\n|---|---|---|---|---|---|---|---|---|"
)


def header(commit: str) -> str:
    import triton

    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return (
        f"# Host time of a guarded step on a GPU\n\ntrimtab {__version__} at {commit or git.stdout.strip()}, "
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}, "
        f"Python {platform.python_version()}. Command: `PYTHONPATH=src python benchmarks/gpu_host.py "
        f"{' '.join(sys.argv[1:])}`.\n\nTime on the host from the forward pass to the end of `zero_grad`, the device "
        f"idle before each step, µs; steps after the first {WARM_BLOCKS * BLOCK}, recorded to disk as by default. Two "
        "numbers: what is added to an ordinary step, and to the mean of all steps, those of every 10th, 20th and 50th "
        "step included. The default AdamW is not fused: only the host can stop it, so each of its steps waits for the "
        "device once.\n"
    )


PARTS = (
    ("forward hook", "trimtab.sample.probes.forward", "ForwardTap", "__call__"),
    ("  input probe", "trimtab.sample.probes.batch", "BatchProbe", "inputs"),
    ("  output probe", "trimtab.sample.probes.forward", "ForwardTap", "left"),
    ("gradient hook", "trimtab.sample.probes.sentinel", "Sentinel", "_on_gradient"),
    ("Guard.step", "trimtab.guard.guard", "Guard", "step"),
    ("  told", "trimtab.sample.observed", "Observed", "told"),
    ("  Lane.before", "trimtab.guard.lane", "Lane", "before"),
    ("    begin", "trimtab.guard.lane", "Lane", "_begin"),
    ("    Watch.before", "trimtab.sample.watch", "Watch", "before"),
    ("      sentinel", "trimtab.sample.probes.sentinel", "Sentinel", "before"),
    ("    Judge on device", "trimtab.guard.protect", "Judge", "_on_device"),
    ("      Meter.measure", "trimtab.sample.measure.meter", "Meter", "measure"),
    ("        Plan.run", "trimtab.sample.measure.triton_launch", "Plan", "run"),
    ("          launches", "trimtab.sample.measure.triton_launch", "Plan", "_start"),
    ("            graph", "torch.cuda", "CUDAGraph", "replay"),
    ("            event", "torch.cuda", "Event", "record"),
    ("      arm", "trimtab.guard.protect", "DeviceGate", "arm"),
    ("  Lane.after", "trimtab.guard.lane", "Lane", "after"),
    ("    Watch.after", "trimtab.sample.watch", "Watch", "after"),
    ("    post", "trimtab.sample.transfer", "DelayedSamples", "post"),
    ("    open", "trimtab.sample.transfer", "DelayedSamples", "_open"),
    ("    hand over", "trimtab.guard.lane", "Lane", "_hand_over"),
    ("      brain", "trimtab.core.pipeline", "Brain", "advance"),
    ("      record", "trimtab.record.recorder", "Recorder", "put"),
)


@contextmanager
def marks(spent_s: dict[str, list[float]]) -> Iterator[None]:
    """Time every call of the parts; a part's time holds that of the parts below it."""
    import importlib

    put_back = []
    for label, module, owner, method in PARTS:
        kind = getattr(importlib.import_module(module), owner)
        inner = kind.__dict__[method]

        def timed(*args: Any, _inner: Any = inner, _label: str = label, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return _inner(*args, **kwargs)
            finally:
                spent_s.setdefault(_label, []).append(time.perf_counter() - start)

        setattr(kind, method, timed)
        put_back.append((kind, method, inner))
    try:
        yield
    finally:
        for kind, method, inner in put_back:
            setattr(kind, method, inner)


def parts(workload: Workload, fused: bool | None, folder: Path) -> str:
    """Where the time of a guarded step goes, µs per step."""
    spent_s: dict[str, list[float]] = {}
    num = 200
    with marks(spent_s):
        arm = arm_of("guard", workload, compiled=False, fused=fused, folder=folder / "parts")
        for i in range(WARM_BLOCKS + num // BLOCK):
            if i == WARM_BLOCKS:
                spent_s.clear()
            run_block(arm, [workload.batch() for _ in range(BLOCK)])
        if arm.guard is not None:
            arm.guard.close()
    lines = [
        f"{label:20} {sum(took) / num * 1e6:7.1f} a step, {statistics.median(took) * 1e6:7.1f} a call"
        for label, *_ in PARTS
        if (took := spent_s.get(label, [])[: 20 * num])
    ]
    return "\n".join([f"{workload.name}, {'fused' if fused else 'default'} AdamW, eager", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="eager and fused only, a third of the blocks")
    parser.add_argument("--fused", action="store_true", help="the fused AdamW only")
    parser.add_argument("--only", help="one model, by its name")
    parser.add_argument("--parts", action="store_true", help="where the time of a guarded step goes")
    parser.add_argument("--commit", default="", help="what to write as the commit, outside of a checkout")
    parser.add_argument("--out", type=Path, help="also write the report here")
    args = parser.parse_args()
    wanted = [w for w in WORKLOADS if args.only in (None, w.name)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.parts:
            for workload in wanted:
                print(parts(workload, True, folder), flush=True)
            return
        lines = [header(args.commit), HEAD]
        print(lines[1], flush=True)
        for workload in wanted:
            for compiled in (False,) if args.quick else (False, True):
                for fused in (True,) if args.quick or args.fused else (True, None):
                    blocks = workload.blocks // 3 if args.quick else workload.blocks
                    row = measure(workload, compiled=compiled, fused=fused, blocks=blocks, folder=folder)
                    lines.append(row.line())
                    print(row.line(), flush=True)
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
