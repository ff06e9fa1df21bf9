"""The N-way losses on one CUDA GPU: right to float64 first, then time and memory beside what exists, all in one run.

    PYTHONPATH=src python benchmarks/gpu_nway.py [--out FILE] [--commit HASH] [--quick] [--skip-errors]

Errors are relative to the same problem in float64 on the card, cotangents of both signs, the normalisation of the rows
in the gradient. Times are forward + backward from device events: the host waited for after every step (median and
least of the repetitions), and per step where ten steps are issued in a row, as a training loop does (queued). Memory is
the peak above the inputs, gradients included. TFLOP/s counts 8 B^N D operations (forward 2, recomputation 2, gradients
4) for the streams, 12 B^N for the contraction, 6 for what keeps its logits; beside it is the share of what one large
product of the matrix library reaches in the same precision and the same run.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import chain, product
from pathlib import Path

import torch
import triton
from torch import Tensor, nn

from trimtab import __version__
from trimtab.losses import nway_loss
from trimtab.losses.tuple_reduction import products_in

sys.path.insert(0, str(Path(__file__).parent))
from gpu_nway_checks import DEVICE, WIDTH, behaviour, correctness, rows
from nway_ways import clip_cross_entropy, norm_materialised, paircos_materialised, product_materialised, symile

LINES: list[str] = []


def say(text: str = "") -> None:
    LINES.append(text)
    print(text, flush=True)


# -- then fast -------------------------------------------------------------------------------------------------------


def measure(run: Callable[[], Tensor], leaves: Sequence[Tensor], budget_s: float) -> tuple[float, ...] | str:
    """Median and least milliseconds, milliseconds where steps are queued, peak GiB; or why not."""
    try:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        times: list[float] = []
        start = time.monotonic()

        def steps(count: int) -> float:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
            for _ in range(count):
                for x in leaves:
                    x.grad = None
                run().backward()
            events[1].record()
            torch.cuda.synchronize()
            return events[0].elapsed_time(events[1]) / count

        while not times or (len(times) < 40 and time.monotonic() - start < (budget_s if len(times) > 3 else 10.0)):
            times.append(steps(1))
        peak = (torch.cuda.max_memory_allocated() - base) / 2**30
        kept = times[2:] or times  # the first ones compile and fill the allocator
        queued = steps(10) if min(kept) < 100 else float("nan")
        return statistics.median(kept), min(kept), queued, peak
    except torch.OutOfMemoryError:
        return "out of memory"
    finally:
        for x in leaves:
            x.grad = None


def by_hand(
    way: Callable[[Sequence[Tensor], float], Tensor], xs: Sequence[Tensor], scale: float
) -> Callable[[], Tensor]:
    """A way of `nway_ways.py`, whose labels go where the default device is."""

    def run() -> Tensor:
        with torch.device(DEVICE):
            return way(xs, scale)

    return run


def line(
    problem: str, way: str, run: Callable[[], Tensor], leaves: Sequence[Tensor], flops: float, roof: float
) -> None:
    found = measure(run, leaves, 1.0)
    if isinstance(found, str):
        say(f"| {problem} | {way} | {found} | | | | | |")
        return
    median, least, queued, peak = found
    rate = flops / median / 1e9
    share = f"{rate:.0f} | {100 * rate / roof:.0f} %" if flops else " | "
    say(f"| {problem} | {way} | {median:.2f} | {least:.2f} | {queued:.2f} | {peak:.3f} | {share} |")


def matmul_rate(precision: str = "bf16") -> float:
    """TFLOP/s of a large product of the matrix library, in the faster of two layouts of the second operand."""
    kind = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(16384, 8192, device=DEVICE).to(kind) for _ in range(2))
    best = 0.0
    with products_in("tf32" if precision == "tf32" else "ieee", DEVICE):
        for other in (b.T, b.T.contiguous()):
            found = []
            for _ in range(8):
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
                events[0].record()
                a @ other
                events[1].record()
                torch.cuda.synchronize()
                found.append(2 * 16384 * 16384 * 8192 / events[0].elapsed_time(events[1]) / 1e9)
            best = max(best, statistics.median(found[2:]))
    return best


def lasting_rate(seconds: float = 1.0) -> float:
    """TFLOP/s of the same product in bfloat16 in the second half of so many seconds: a busy card slows down to its
    power limit, and a long loss is held to that."""
    a, b = (torch.randn(16384, 8192, device=DEVICE).bfloat16() for _ in range(2))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    start, count = time.monotonic(), 0
    late = False
    while time.monotonic() - start < seconds:
        if not late and time.monotonic() - start > seconds / 2:
            late = True
            events[0].record()
        for _ in range(4):
            a @ b.T
        count += 4 * late
        torch.cuda.synchronize()
    events[1].record()
    torch.cuda.synchronize()
    return 2 * 16384 * 16384 * 8192 * count / events[0].elapsed_time(events[1]) / 1e9


def speed(quick: bool) -> None:
    roofs = {precision: matmul_rate(precision) for precision in ("bf16", "tf32", "fp32")}
    roof = roofs["bf16"]
    rates = ", ".join(f"{rate:.0f} TFLOP/s in {precision}" for precision, rate in roofs.items())
    lasting = f"{lasting_rate():.0f} TFLOP/s in bf16 where it is repeated for a second"
    say(f"## Forward + backward, D={WIDTH}\n\nA product 16384 x 8192 x 16384 in this run: {rates}; {lasting}.\n")
    say("| problem | way | median ms | least ms | queued ms | peak GiB | TFLOP/s | of the product |")
    say("|---|---|---|---|---|---|---|---|")

    def ours(xs: list[Tensor], **settings: object) -> Callable[[], Tensor]:
        return lambda: nway_loss(xs, objective="full", **settings)  # type: ignore[call-overload, no-any-return]

    others = {32: list(product(("tf32", "fp32"), ("triton", "stream"))), 64: [("tf32", "triton")]}
    for b in (16, 32) if quick else (16, 32, 48, 64):
        xs, tuples = rows(6, b), float(b) ** 6
        scale, name = WIDTH**2 / 15, f"mip full N=6 B={b} ({tuples:.2g} tuples)"
        if b <= 32:
            halves = [x.detach().bfloat16().requires_grad_() for x in xs]
            for way, leaves, mode in (("fp32", xs, "ieee"), ("tf32", xs, "tf32"), ("bf16", halves, "ieee")):
                torch.backends.cuda.matmul.fp32_precision = mode
                run = by_hand(product_materialised, leaves, scale)
                line(name, f"by hand: materialised {way}", run, leaves, 6 * tuples * WIDTH, roofs[way])
            torch.backends.cuda.matmul.fp32_precision = "ieee"
            if b == 16:
                line(name, "by hand: Symile's formula fp32", by_hand(symile, xs, scale), xs, 0, roof)
        even = [(x.detach() * WIDTH**0.5).requires_grad_() for x in xs]
        fast = {"similarity": "mip", "precision": "bf16", "backend": "triton"}
        run = ours(even, logit_scale=1 / 15 / WIDTH, normalize=None, **fast)
        line(name, "**trimtab triton bf16**, rows normalised before", run, even, 8 * tuples * WIDTH, roof)
        line(
            name, "the same with the normalisation", ours(xs, logit_scale=1 / 15, **fast), xs, 8 * tuples * WIDTH, roof
        )
        for precision, backend in others.get(b, []):
            run = ours(xs, logit_scale=1 / 15, similarity="mip", precision=precision, backend=backend)
            line(name, f"trimtab {backend} {precision}", run, xs, 8 * tuples * WIDTH, roofs[precision])
    xs, tuples, name = rows(2, 32768), 32768.0**2, "CLIP N=2 B=32768"
    halves = [x.detach().bfloat16().requires_grad_() for x in xs]
    for way, leaves, mode in (("tf32", xs, "tf32"), ("bf16", halves, "ieee")):
        torch.backends.cuda.matmul.fp32_precision = mode
        run = by_hand(clip_cross_entropy, leaves, 20.0)
        line(name, f"by hand: F.cross_entropy {way}", run, leaves, 6 * tuples * WIDTH, roofs[way])
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    for c in (20.0, 100.0):
        fast = {"similarity": "mip", "precision": "bf16", "backend": "triton", "logit_scale": c}
        run = ours(xs, normalize=None, **fast)
        line(name, f"**trimtab triton bf16**, scale {c:g}, rows normalised before", run, xs, 8 * tuples * WIDTH, roof)
        run = ours(xs, normalize="l2", **fast)
        line(name, "the same with the normalisation", run, xs, 8 * tuples * WIDTH, roof)
    run = ours(xs, similarity="mip", precision="tf32", backend="triton", logit_scale=20.0, normalize=None)
    line(name, "trimtab triton tf32, scale 20, rows normalised before", run, xs, 8 * tuples * WIDTH, roofs["tf32"])
    del halves
    for n, b in (
        ((6, 32), (3, 1024)) if quick else ((6, 32), (6, 64), (6, 96), (6, 128), (3, 1024), (3, 4096), (3, 8192))
    ):
        xs, tuples, name = rows(n, b), float(b) ** n, f"paircos full N={n} B={b} ({float(b) ** n:.2g} tuples)"
        if tuples < 2e9:
            line(name, "by hand: materialised", by_hand(paircos_materialised, xs, 20.0), xs, 0, roof)
        for precision in ("fp32", "tf32", "bf16") if tuples < 1e12 else ("tf32", "bf16"):
            run = ours(xs, similarity="paircos", logit_scale=20.0, backend="contract", precision=precision)
            line(name, f"**trimtab contract {precision}**", run, xs, 12 * tuples, roofs[precision])
    for b in (32,) if quick else (32, 64):
        xs, name = rows(6, b), f"norm full N=6 B={b} ({float(b) ** 6:.2g} tuples)"
        if b == 32:
            line(name, "by hand: materialised", by_hand(norm_materialised, xs, 8.0), xs, 0, roof)
            line(name, "trimtab gram", ours(xs, similarity="norm", logit_scale=8.0, backend="gram"), xs, 0, roof)
        for c in (8.0, 100.0):
            run = ours(xs, similarity="norm", logit_scale=c, backend="triton")
            line(name, f"**trimtab triton**, scale {c:g}", run, xs, 0, roof)
    say()


# -- and as part of a step -------------------------------------------------------------------------------------------


def share_of_a_step() -> None:
    """A36: what the loss adds to a training step of six transformer towers, arms taking turns."""
    torch.manual_seed(0)
    layers, tokens, batch = 12, 128, 64
    make = nn.TransformerEncoderLayer
    towers = nn.ModuleList(
        nn.TransformerEncoder(
            make(WIDTH, 8, 4 * WIDTH, 0.0, batch_first=True, norm_first=True), layers, enable_nested_tensor=False
        )
        for _ in range(6)
    ).to(DEVICE)
    optimizer = torch.optim.AdamW(towers.parameters(), 1e-4, fused=True)
    inputs = [torch.randn(batch, tokens, WIDTH, device=DEVICE) for _ in range(6)]
    fixed = [torch.randn(batch, WIDTH, device=DEVICE) for _ in range(6)]

    def step(loss: Callable[[list[Tensor]], Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            xs = [tower(x).mean(1) for tower, x in zip(towers, inputs, strict=True)]
        loss([x.float() for x in xs]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def nothing(xs: list[Tensor]) -> Tensor:
        return torch.stack([(x * f).mean() for x, f in zip(xs, fixed, strict=True)]).sum()

    arms: dict[str, Callable[[list[Tensor]], Tensor]] = {"a sum of products": nothing}
    for similarity in ("norm", "mip"):
        arms[f"`nway_loss` axis {similarity}"] = lambda xs, s=similarity: nway_loss(xs, similarity=s, objective="axis")
    arms["six-way full mip bf16 (triton)"] = lambda xs: nway_loss(
        xs, similarity="mip", objective="full", logit_scale=1 / 15, precision="bf16"
    )
    alone = [torch.randn(batch, WIDTH, device=DEVICE, requires_grad=True) for _ in range(6)]
    by_itself = {name: measure(lambda loss=loss: loss(alone), alone, 0.3) for name, loss in arms.items()}
    times: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(7):
        for name, loss in arms.items():
            for _ in range(1 if "full" in name else 5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                step(loss)
                torch.cuda.synchronize()
                if turn:
                    times[name].append(1e3 * (time.perf_counter() - start))
    weights = sum(p.numel() for p in towers.parameters()) / 1e6
    say(f"## A36: a step of six towers ({layers} layers, {tokens} tokens, B={batch}, {weights:.0f} M weights, bf16)\n")
    say("| loss | step ms (median) | adds | the loss by itself ms |\n|---|---|---|---|")
    plain = statistics.median(times["a sum of products"])
    for name, found in times.items():
        middle = statistics.median(found)
        say(f"| {name} | {middle:.2f} | {100 * (middle / plain - 1):+.1f} % | {by_itself[name][0]:.2f} |")
    say()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit")
    parser.add_argument("--quick", action="store_true", help="no large sizes")
    parser.add_argument("--skip-errors", action="store_true")
    given = parser.parse_args()
    commit = given.commit
    if commit is None:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    say("# The N-way losses on a GPU\n")
    say(
        f"trimtab {__version__} at {commit}, {torch.cuda.get_device_name()}, torch {torch.__version__}, Triton "
        f"{triton.__version__}, Python {platform.python_version()}. "
        "Command: `PYTHONPATH=src python benchmarks/gpu_nway.py --out FILE`.\n"
    )
    try:
        for text in () if given.skip_errors else chain(correctness(), behaviour()):
            say(text)
        speed(given.quick)
        share_of_a_step()
    finally:
        if given.out:
            given.out.write_text("\n".join(LINES) + "\n")


if __name__ == "__main__":
    main()
