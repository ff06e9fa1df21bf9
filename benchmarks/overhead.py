"""What guarding a step costs on the CPU, beside the ways people measure and clip today, all in one run.

    python benchmarks/overhead.py [--quick] [--out benchmarks/results/overhead_cpu_2026-11-15.md]

Every arm trains its own copy of the same model on the same batches. The arms take turns in short blocks, in rotating
order, so that a noisy machine hits all of them alike; the record is written as in real use. Figures are processor
time: of the part of a step behind the backward pass, where all arms but detect_anomaly do all their work, and of the
guard's own threads wherever they ran; means of the paired differences to the unguarded arm with their standard error.
The thorough look that the guard takes every 50 steps is measured by an arm that takes it in every step, and its 50th
part is added: in a short run it would otherwise fall into too few blocks to be averaged, or be trimmed away.
"""

from __future__ import annotations

import argparse
import math
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trimtab import Config, Guard, __version__

LIMITS = {"MLP": 45.0, "GPT small": 4.0, "GPT large": 2.0}
EXTRA_US = 150.0
FULL_ARM = "guard, full look every step"
EVERY = Config().full_every


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


@dataclass
class Workload:
    """A model, its batches, and how many steps make a block."""

    name: str
    what: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    block: int
    rounds: int


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def tokens(batch: int, length: int, vocabulary: int) -> Callable[[], tuple[Tensor, Tensor]]:
    def make() -> tuple[Tensor, Tensor]:
        x = torch.randint(0, vocabulary, (batch, length + 1))
        return x[:, :-1], x[:, 1:]

    return make


WORKLOADS = [
    Workload("MLP", "batch 32", mlp, lambda: (torch.randn(32, 64), torch.randint(0, 10, (32,))), block=50, rounds=50),
    Workload("GPT small", "batch 8 x 64 tokens", lambda: GPT(128, 96, 4, 4, 64), tokens(8, 64, 128), 10, 20),
    Workload("GPT large", "batch 8 x 64 tokens", lambda: GPT(512, 256, 6, 4, 64), tokens(8, 64, 512), 4, 20),
]


@dataclass
class Arm:
    """One way of stepping, with its own model."""

    name: str
    step: Callable[[nn.Module, torch.optim.Optimizer, Tensor], None]
    model: nn.Module
    optimizer: torch.optim.Optimizer
    whole_us: list[float] = field(default_factory=list)
    phase_us: list[float] = field(default_factory=list)
    guard: Guard | None = None
    anomaly: bool = False


def bare(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.step()


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def item_by_item(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Seven statistics a parameter, each fetched on its own: how the source documents read gradients."""
    for p in model.parameters():
        if (g := p.grad) is not None:
            g.norm().item(), g.mean().item(), g.std().item(), g.max().item(), g.min().item()
            g.isnan().any().item(), g.isinf().any().item()
    optimizer.step()


def arms_of(workload: Workload, folder: Path) -> list[Arm]:
    def build(name: str, step: Callable[..., None] | None = None, **guard: object) -> Arm:
        torch.manual_seed(0)
        model = workload.make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        if step is not None:
            return Arm(name, step, model, optimizer, anomaly=name == "detect_anomaly")
        watch = Guard(model, optimizer, run_dir=folder / f"{workload.name}-{name}", **guard)  # type: ignore[arg-type]
        return Arm(name, lambda m, o, loss: watch.step(loss) and None, model, optimizer, guard=watch)

    return [
        build("unguarded", bare),
        build("guard", config={"full_every": 0}),
        build("guard, clip=1.0", clip=1.0, config={"full_every": 0}),
        build(FULL_ARM, config={"full_every": 1}),
        build("clip_grad_norm_", clipped),
        build(".item() per tensor", item_by_item),
        build("detect_anomaly", bare),
    ]


def run_block(arm: Arm, batches: list[tuple[Tensor, Tensor]]) -> None:
    """Time the part of each step behind the backward pass, where every arm but detect_anomaly does all its work."""
    phase_s = 0.0
    start, start_mine = time.process_time(), time.thread_time()
    with torch.autograd.set_detect_anomaly(arm.anomaly):
        for x, y in batches:
            out = arm.model(x)
            loss = F.cross_entropy(out.flatten(0, -2), y.flatten())
            loss.backward()
            before = time.thread_time()
            arm.step(arm.model, arm.optimizer, loss)
            phase_s += time.thread_time() - before
            arm.optimizer.zero_grad()
    whole_s = time.process_time() - start
    background_s = whole_s - (time.thread_time() - start_mine)  # the recorder's threads, wherever they ran
    arm.whole_us.append(whole_s / len(batches) * 1e6)
    arm.phase_us.append((phase_s + background_s) / len(batches) * 1e6)


def measure(workload: Workload, rounds: int, folder: Path) -> list[Arm]:
    arms = arms_of(workload, folder)
    torch.manual_seed(1)
    for i in range(rounds + 2):
        batches = [workload.batch() for _ in range(workload.block)]
        order = arms[:]
        random.Random(i).shuffle(order)
        for arm in order:
            run_block(arm, batches)
    for arm in arms:
        del arm.whole_us[:2], arm.phase_us[:2]  # warm-up
        if arm.guard is not None:
            found = {f.name for f in arm.guard.findings}
            assert found <= {"targets-do-not-predict", "not-learning"}, (
                found
            )  # random tokens: there is nothing to learn
            arm.guard.close()
    return arms


@dataclass
class Cost:
    """What an arm adds to the unguarded step, paired block by block."""

    mean_us: float
    error_us: float
    percent: float
    percent_error: float


def cost(arm: Arm, base: Arm) -> Cost:
    """The mean of the paired differences, the outer tenth on each side left out (other processes), with its error."""
    mine, theirs = (arm.whole_us, base.whole_us) if arm.anomaly else (arm.phase_us, base.phase_us)
    pairs = sorted(a - b for a, b in zip(mine, theirs, strict=True))
    cut = len(pairs) // 10
    kept = pairs[cut : len(pairs) - cut]
    mean, error = statistics.fmean(kept), statistics.stdev(kept) / math.sqrt(len(kept))
    usual = statistics.median(base.whole_us)
    return Cost(mean, error, 100 * mean / usual, 100 * error / usual)


def amortised(costs: dict[str, Cost]) -> dict[str, Cost]:
    """Add to the plain guard's cost its share of the thorough look: what default settings really cost."""
    look = costs[FULL_ARM]
    out = {}
    for name, c in costs.items():
        if name.startswith("guard") and name != FULL_ARM:
            extra, extra_percent = (
                (look.mean_us - costs["guard"].mean_us) / EVERY,
                (look.percent - costs["guard"].percent) / EVERY,
            )
            c = Cost(c.mean_us + extra, c.error_us, c.percent + extra_percent, c.percent_error)
        out[name] = c
    return out


def report(results: dict[str, tuple[Workload, list[Arm]]]) -> str:
    lines = []
    for name, (workload, arms) in results.items():
        base = arms[0]
        size = sum(p.numel() for p in base.model.parameters())
        tensors = sum(1 for _ in base.model.parameters())
        usual = statistics.median(base.whole_us)
        lines += [
            f"### {name}: {size:,} parameters in {tensors} tensors, {workload.what}, AdamW; "
            f"unguarded step {usual / 1e3:.2f} ms ({len(base.whole_us)} blocks of {workload.block} steps)",
            "",
            "| arm | adds µs per step | adds % |",
            "|---|---|---|",
        ]
        costs = amortised({arm.name: cost(arm, base) for arm in arms[1:]})
        for arm_name, c in costs.items():
            lines.append(
                f"| {arm_name} | {c.mean_us:+.0f} ± {c.error_us:.0f} | {c.percent:+.1f} ± {c.percent_error:.1f} |"
            )
        over_clip = costs["guard"].mean_us - costs["clip_grad_norm_"].mean_us
        lines += [
            "",
            f"- guard over `clip_grad_norm_`: {over_clip:+.0f} µs (at most {EXTRA_US:+.0f}): "
            f"{'holds' if over_clip <= EXTRA_US else 'FAILS'}",
            f"- guard over unguarded: {costs['guard'].percent:+.1f} % (at most {LIMITS[name]:.0f} %): "
            f"{'holds' if costs['guard'].percent <= LIMITS[name] else 'FAILS'}",
            "",
        ]
    return "\n".join(lines)


def header() -> str:
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    commit = git.stdout.strip() or "unknown"
    processor = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "CPU"
    )
    return (
        f"# Overhead of a guarded step on the CPU\n\ntrimtab {__version__} at {commit}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, {processor}, one torch thread.\n\n"
        f"Command: `python benchmarks/overhead.py {' '.join(sys.argv[1:])}`. Processor time behind the backward pass "
        "plus the guard's own threads (detect_anomaly: the whole step), percent of the whole step; mean of paired "
        f"block differences, the outer tenth on each side left out, ± standard error. The guard records as by default; "
        f"its rows include 1/{EVERY} of a full look, as default settings take one every {EVERY} steps.\n"
    )


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a fifth of the rounds")
    parser.add_argument("--out", type=Path, help="also write the report here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for workload in WORKLOADS:
            rounds = max(workload.rounds // 5, 4) if args.quick else workload.rounds
            results[workload.name] = (workload, measure(workload, rounds, Path(folder)))
            print(f"{workload.name} done", file=sys.stderr)
    text = header() + "\n" + report(results)
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
