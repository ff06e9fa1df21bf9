"""What health costs on one CUDA GPU, beside bare clipping and the ways peers read gradients, all in one run.

    PYTHONPATH=src python benchmarks/measure.py [--out benchmarks/results/measure_h200_2026-11-15.md] [--quick]

Three parts: the one-pass kernel against its floor (`torch.sum` over the same bytes), the marginal cost over a bare
fused AdamW step, and a whole training step of a 300 M-parameter transformer. Arms take turns in rounds; each figure is
the median over rounds of wall-clock time per step, the device waited for at the end of a block only.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trimtab import Guard, __version__
from trimtab.sample.measure.reference import Limits
from trimtab.sample.measure.triton_launch import Plan

sys.path.insert(0, str(Path(__file__).parent))
from overhead import GPT
from tune_stats import gpt, milliseconds

DEVICE = torch.device("cuda")
LINES: list[str] = []


def say(text: str = "") -> None:
    LINES.append(text)
    print(text, flush=True)


# -- the kernel against its floor ------------------------------------------------------------------------------------


def kernel_times() -> None:
    say("## The kernel against `torch.sum` over the same bytes\n")
    say("Seven statistics of every tensor, global norm, flags, in three launches; device time of a replayed graph.\n")
    say("| gradients | bytes | `torch.sum` ms | ours ms | ratio | launched one by one |")
    say("|---|---|---|---|---|---|")
    cases: list[tuple[str, list[tuple[int, ...]], torch.dtype]] = [
        ("355 M fp32, 292 tensors", gpt(1024, 24), torch.float32),
        ("355 M bf16, 292 tensors", gpt(1024, 24), torch.bfloat16),
        ("1.6 B bf16, 580 tensors", gpt(1600, 48), torch.bfloat16),
    ]
    for name, shapes, dtype in cases:
        tensors = [torch.randn(s, device=DEVICE).mul_(1e-3).to(dtype) for s in shapes]
        size = sum(t.numel() * t.element_size() for t in tensors)
        flat = torch.randn(size // 4, device=DEVICE)
        plan = Plan(tensors, None, len(tensors))
        addresses = [t.data_ptr() for t in tensors]

        def ours(plan: Plan = plan, tensors: list[Tensor] = tensors, addresses: list[int] = addresses) -> None:
            plan.run(tensors, addresses, Limits(), capturing=torch.cuda.is_current_stream_capturing())

        replay = graph_of(ours)
        floor, graphed, eager = [], [], []
        for _ in range(5):  # interleaved
            floor.append(milliseconds(lambda flat=flat: torch.sum(flat), repeats=5))
            graphed.append(milliseconds(replay, repeats=5))
            eager.append(milliseconds(ours, repeats=5))
        f, g, e = (statistics.median(v) for v in (floor, graphed, eager))
        say(f"| {name} | {size / 1e9:.2f} GB | {f:.3f} | {g:.3f} | {g / f:.2f}x | {e:.3f} ms, {e / f:.2f}x |")
        del tensors, flat, plan
        torch.cuda.empty_cache()
    say()


def graph_of(function: Callable[[], None]) -> Callable[[], None]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay  # type: ignore[no-any-return]


# -- the marginal cost over a bare optimizer step --------------------------------------------------------------------

Params = list[nn.Parameter]


class Holder(nn.Module):
    def __init__(self, params: Params) -> None:
        super().__init__()
        self.all = nn.ParameterList(params)


def clip(params: Params) -> None:
    torch.nn.utils.clip_grad_norm_(params, 1.0)


def clip_item(params: Params) -> None:
    torch.nn.utils.clip_grad_norm_(params, 1.0).item()


def foreach_norms(params: Params) -> None:
    torch.stack(torch._foreach_norm([p.grad for p in params])).tolist()


def item_per_tensor(params: Params) -> None:
    for p in params:
        p.grad.norm(2).item(), p.grad.isnan().any().item(), p.grad.isinf().any().item()  # type: ignore[union-attr]


def histograms(params: Params) -> None:
    for p in params:
        g = p.grad.float().flatten()  # type: ignore[union-attr]
        torch.histc(g, 64, g.min().item(), g.max().item()).cpu()


def marginal(
    name: str, shapes: list[tuple[int, ...]], dtype: torch.dtype, *, fused: bool, rounds: int, steps: int
) -> None:
    params = [nn.Parameter(torch.randn(s, device=DEVICE, dtype=dtype) * 0.02) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 1e-3
    model = Holder(params)
    optimizer = torch.optim.AdamW(params, lr=1e-5, fused=fused)
    loss = torch.ones((), device=DEVICE)
    ways: dict[str, Callable[[Params], None] | dict[str, Any] | None] = {
        "bare step": None,
        "`clip_grad_norm_`": clip,
        "`clip_grad_norm_` + `.item()`": clip_item,
        "foreach norms + `.tolist()`": foreach_norms,
        "three `.item()` per tensor": item_per_tensor,
        "histograms": histograms,
        "guard: all statistics + gate": {"full_every": 0},
        "the same, weights and updates every 50 steps (default)": {"full_every": 50},
        "guard, clip=1.0, few steps clipped": {"clip": 1.0, "full_every": 0},
        "guard, clip=1.0, every step clipped": {"clip": 1.0, "full_every": 0, "often": True},
    }
    slow = {"three `.item()` per tensor", "histograms"}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for r in range(rounds):
        for way, how in ways.items():
            if way in slow and r >= 2:
                continue
            times[way].append(block(model, optimizer, params, loss, how, 3 if way in slow else steps))
    bare = statistics.median(times["bare step"])
    added = {way: statistics.median(t) - bare for way, t in times.items()}
    base = added["`clip_grad_norm_`"]
    kind = "fused" if fused else "foreach (PyTorch's default)"
    say(f"### {name}, {kind} AdamW: bare step {bare:.3f} ms\n")
    say("| way | adds ms | of `clip_grad_norm_` |")
    say("|---|---|---|")
    for way in list(ways)[1:]:
        spread = f" ± {statistics.stdev(times[way]):.3f}" if len(times[way]) > 1 else ""
        say(f"| {way} | {added[way]:+.3f}{spread} | {added[way] / base:.2f}x |")
    say()
    del params, model, optimizer
    torch.cuda.empty_cache()


def block(model: nn.Module, optimizer: Any, params: Params, loss: Tensor, how: Any, steps: int) -> float:
    """Milliseconds per step of one way; a guard is attached for the block, its plan made in the warm-up."""
    guarded = isinstance(how, dict)
    context: AbstractContextManager[Any] = nullcontext()
    if guarded:
        settings = {"full_every": how["full_every"]}
        context = Guard(model, optimizer, settings, run_dir=tempfile.mkdtemp(), clip=how.get("clip"))
        if how.get("often"):  # what the guard itself chooses where more than half of the steps are clipped
            context._lanes[""]._judge._clip_rate = float("inf")  # type: ignore[attr-defined]
    with context as guard:
        for phase, num in (("warm", 4), ("timed", steps)):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(num):
                if guarded:
                    guard.step(loss)
                else:
                    if how is not None:
                        how(params)
                    optimizer.step()
            torch.cuda.synchronize()
            spent = (time.perf_counter() - start) / num * 1e3
            assert phase
    return spent


# -- a whole training step -------------------------------------------------------------------------------------------


def end_to_end(rounds: int, steps: int) -> None:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    model = GPT(32768, 1024, 20, 16, 1024).to(DEVICE)
    size = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = [torch.randint(0, 32768, (8, 1025), device=DEVICE) for _ in range(4)]
    ways: dict[str, Any] = {
        "no clipping": None,
        "`clip_grad_norm_`": clip,
        "guard": {},
        "guard, clip=1.0": {"clip": 1.0},
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, how in ways.items():
            times[way].append(training_block(model, optimizer, batches, how, steps))
    say(f"## A whole training step: {size / 1e6:.0f} M-parameter transformer, 8 x 1024 tokens\n")
    say("bf16 autocast, fused AdamW, fp32 weights and gradients.\n")
    say("| way | ms per step | over no clipping |")
    say("|---|---|---|")
    bare = statistics.median(times["no clipping"])
    for way, values in times.items():
        t = statistics.median(values)
        say(f"| {way} | {t:.2f} ± {statistics.stdev(values):.2f} | {100 * (t / bare - 1):+.2f} % |")
    say()


def training_block(model: nn.Module, optimizer: Any, batches: list[Tensor], how: Any, steps: int) -> float:
    guarded = isinstance(how, dict)
    context: AbstractContextManager[Any] = nullcontext()
    if guarded:
        context = Guard(model, optimizer, run_dir=tempfile.mkdtemp(), **how)
    params = list(model.parameters())
    with context as guard:
        for num in (3, steps):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(num):
                batch = batches[i % len(batches)]
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    out = model(batch[:, :-1])
                    loss = F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten())
                loss.backward()
                if guarded:
                    guard.step(loss)
                else:
                    if how is not None:
                        how(params)
                    optimizer.step()
                optimizer.zero_grad()
            torch.cuda.synchronize()
            spent = (time.perf_counter() - start) / num * 1e3
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", default="")
    args = parser.parse_args()
    logging.getLogger("trimtab").setLevel(logging.ERROR)
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    say("# What health costs on a GPU\n")
    say(
        f"trimtab {__version__} at {args.commit or git.stdout.strip() or 'unknown'}, {torch.cuda.get_device_name()}, "
        f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}. "
        f"Command: `PYTHONPATH=src python benchmarks/measure.py {' '.join(sys.argv[1:])}`. The guard records to disk "
        "as by default.\n"
    )
    rounds = 3 if args.quick else 7
    kernel_times()
    say("## Marginal cost over a bare optimizer step\n")
    say(f"Median of {rounds} rounds of 100 steps each, arms taking turns; ± standard deviation over rounds.\n")
    marginal("355 M fp32, 292 tensors", gpt(1024, 24), torch.float32, fused=True, rounds=rounds, steps=100)
    marginal("355 M bf16, 292 tensors", gpt(1024, 24), torch.bfloat16, fused=True, rounds=rounds, steps=100)
    marginal("1.6 B bf16, 580 tensors", gpt(1600, 48), torch.bfloat16, fused=True, rounds=3, steps=50)
    marginal("2,000 tensors of 64 x 64 fp32", [(64, 64)] * 2000, torch.float32, fused=True, rounds=rounds, steps=100)
    marginal("355 M fp32, 292 tensors", gpt(1024, 24), torch.float32, fused=False, rounds=3, steps=50)
    end_to_end(rounds, 25)
    if args.out is not None:
        args.out.write_text("\n".join(LINES) + "\n")


if __name__ == "__main__":
    main()
