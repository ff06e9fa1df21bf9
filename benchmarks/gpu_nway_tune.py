"""What other tiles, strips and blocks of the Triton stream would take on a card, and where the time of a step goes.

    PYTHONPATH=src python benchmarks/gpu_nway_tune.py [--kernels] [--blocks] [--steps]

Without an option, all three. Every candidate is compiled in a process of its own and checked against float64 first;
one that is off by more than `LIMITS` is not timed. Kernels are timed under load, candidates taking turns: a card at its
power limit is up to a quarter slower than one that was idle, and short runs would rank candidates by their order.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from trimtab.losses import nway_loss
from trimtab.losses.problem import Problem, make_problem
from trimtab.losses.triton import row_launcher, stream_launcher
from trimtab.losses.triton.stream_launcher import Tiles

sys.path.insert(0, str(Path(__file__).parent))
from gpu_nway import matmul_rate, measure
from gpu_nway_checks import DEVICE, WIDTH, errors, rows

LIMITS = {"bf16": 4e-3, "tf32": 5e-4}
"""Relative errors of a gradient that are allowed: a little over what benchmarks/results/ has."""
CHECKS = ((2, 1008, 20.0), (2, 1008, 300.0), (6, 8, 0.1))
"""Modalities, batch, scale: tiles that are partly filled, both forms of the kernels."""
PAIRED = Tiles(bm=128, bn=128, bk=64, warps=4, stages=3, flat=True, strip=32, beside=2)
ALONE = Tiles(bm=256, bn=128, bk=64, warps=8, stages=4, flat=True, strip=32)
CANDIDATES: dict[tuple[str, str], list[Tiles]] = {
    ("forward", "bf16"): [
        PAIRED, replace(PAIRED, strip=64), ALONE, replace(ALONE, strip=64), replace(ALONE, stages=3),
        replace(ALONE, bk=128, stages=2), replace(ALONE, bm=128, bn=256),
    ],
    ("weights", "bf16"): [
        replace(PAIRED, parts=2), replace(PAIRED, parts=4), replace(ALONE, parts=4), replace(ALONE, parts=8),
        replace(ALONE, stages=3, parts=2), replace(ALONE, bm=128, bn=256, parts=4),
    ],
    ("forward", "tf32"): [
        replace(PAIRED, bk=32), replace(ALONE, bk=32), replace(ALONE, bk=64, stages=2), replace(ALONE, bk=32, strip=64),
    ],
    ("weights", "tf32"): [
        replace(PAIRED, bk=32, parts=8), replace(PAIRED, bk=32, parts=4), replace(ALONE, bk=32, parts=8),
        replace(ALONE, bk=32, stages=3, parts=4), replace(ALONE, bm=128, bn=256, bk=32, parts=8),
    ],
}  # fmt: skip
BLOCKS = ((8192, 16384), (8192, 32768), (16384, 16384), (16384, 32768))
BEGUN = time.monotonic()


def say(text: str = "") -> None:
    print(f"[{time.monotonic() - BEGUN:5.1f}] {text}", flush=True)


def named(tiles: Tiles) -> str:
    size = f"{tiles.bm}x{tiles.bn}x{tiles.bk}, {tiles.warps} warps, {tiles.stages} stages, strip {tiles.strip}"
    return f"{size}, {tiles.parts} parts"


def use(kernel: str, precision: str, tiles: Tiles) -> None:
    stream_launcher.HOPPER[kernel, precision] = tiles  # type: ignore[index]


# -- right -----------------------------------------------------------------------------------------------------------


def check(kernel: str, precision: str, tiles: Tiles) -> str:
    """Errors of one candidate with all the others as they are; compiles what the timing needs."""
    use(kernel, precision, tiles)
    found = []
    for n, b, c in CHECKS:

        def problem(leaves: Sequence[Tensor], scale: Tensor) -> Problem:
            return replace(make_problem(leaves, "mip", logit_scale=scale), precision=precision)  # type: ignore[arg-type]

        found.append(errors("triton_stream", problem, rows(n, b), c))
    Stream.of(2, 4096, precision).forward()
    # A steep softmax follows the rounding of its own logits: beyond the limit of the others.
    limits = [LIMITS[precision] * (50 if c > 100 else 1) for _, _, c in CHECKS]
    bad = [text for text, limit in zip(found, limits, strict=True) if not float(text.split(" | ")[1]) < limit]
    return f"OFF: {bad}" if bad else "ok"


def checked(jobs: Sequence[tuple[str, str, int]]) -> set[tuple[str, str, int]]:
    """Those of the jobs that are right."""
    good = set()
    at_once = 2 * (os.cpu_count() or 1)
    for start in range(0, len(jobs), at_once):
        some = jobs[start : start + at_once]
        here = [sys.executable, __file__, "--job"]
        running = [subprocess.Popen([*here, *map(str, job)], stdout=subprocess.PIPE, text=True) for job in some]
        for job, process in zip(some, running, strict=True):
            text = process.communicate()[0].strip()
            if text == "ok":
                good.add(job)
            else:
                say(f"{job[0]} {job[1]} {named(CANDIDATES[job[0], job[1]][job[2]])}: {text or 'failed'}")
    return good


# -- and fast --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One problem, its passes apart from each other."""

    problem: Problem
    left: row_launcher.Side
    right: row_launcher.Side
    settings: Tensor
    sums: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, n: int, b: int, precision: str) -> Stream:
        size, scale = (1.0, 20.0) if n == 2 else (WIDTH**0.5, 1 / 15 / WIDTH)
        xs = [x.detach() * size for x in rows(n, b)]
        factor = torch.tensor(scale, device=DEVICE)
        problem = replace(make_problem(xs, "mip", logit_scale=factor, normalize=None), precision=precision)  # type: ignore[arg-type]
        form = row_launcher.form_of("mip", n)
        left, right = row_launcher.build_pair(problem.xs, form, problem.precision)
        settings = row_launcher.bounds(form, left, right, factor, stream_launcher.SAFE_NATS)
        sums = torch.empty_like(left.base), torch.empty_like(right.base)
        return cls(problem=problem, left=left, right=right, settings=settings, sums=sums)

    @property
    def flops(self) -> float:
        """Of one product of all super-rows."""
        return 2.0 * self.left.count * self.right.count * WIDTH

    def forward(self) -> None:
        stream_launcher._sums(self.problem, self.left, self.right, self.settings, *self.sums)

    def backward(self, *, products: bool = True) -> None:
        n, batch = self.problem.num_modalities, self.problem.batch
        values = row_launcher.anchors(self.sums, n)
        grad = torch.full_like(values, 1 / (n * batch))
        pull = row_launcher.pulls(values, grad, self.settings, 0, self.left.count, scaled=True, sides=2)
        kept = stream_launcher._add_product
        if not products:
            stream_launcher._add_product = lambda *_, **__: None
        try:
            form = row_launcher.form_of("mip", n)
            stream_launcher._weigh(form, self.problem.precision, self.left, self.right, self.settings, [*pull])
        finally:
            stream_launcher._add_product = kept


def under_load(runs: dict[str, Callable[[], object]], seconds: float = 0.15, turns: int = 3) -> dict[str, float]:
    """Milliseconds of each, all of them taking turns without a pause."""
    found: dict[str, list[float]] = defaultdict(list)
    for turn in range(turns + 1):
        for name, run in runs.items():
            run()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda.synchronize()
            begun, count = time.monotonic(), 0
            marks[0].record()
            while count < 2 or time.monotonic() - begun < seconds:
                for _ in range(2):
                    run()
                count += 2
                if count % 8 == 0:
                    torch.cuda.synchronize()
            marks[1].record()
            torch.cuda.synchronize()
            if turn:
                found[name].append(marks[0].elapsed_time(marks[1]) / count)
    return {name: statistics.median(times) for name, times in found.items()}


def report(title: str, times: dict[str, float], flops: float, roof: float) -> None:
    say(f"{title} (roof {roof:.0f} TFLOP/s)")
    for name, ms in sorted(times.items(), key=lambda item: item[1]):
        rate = flops / ms / 1e9
        print(f"    {ms:9.3f} ms {rate:5.0f} TFLOP/s {100 * rate / roof:3.0f} %  {name}", flush=True)


def kernels(roofs: dict[str, float]) -> None:
    """Each tile kernel by itself, two modalities of 32,768."""
    good = checked([(*key, i) for key, some in CANDIDATES.items() for i in range(len(some))])
    say(f"{len(good)} candidates are right")
    for (kernel, precision), some in CANDIDATES.items():
        kept = dict(stream_launcher.HOPPER)
        stream = Stream.of(2, 32768, precision)
        stream.forward()

        def run(tiles: Tiles, stream: Stream = stream, kernel: str = kernel, precision: str = precision) -> None:
            use(kernel, precision, tiles)
            stream.forward() if kernel == "forward" else stream.backward(products=False)

        runs = {named(t): (lambda t=t: run(t)) for i, t in enumerate(some) if (kernel, precision, i) in good}
        report(f"{kernel} {precision}", under_load(runs), stream.flops, roofs[precision])
        stream_launcher.HOPPER.clear()
        stream_launcher.HOPPER.update(kept)


def blocks(roofs: dict[str, float]) -> None:
    """The whole backward pass with blocks of weights of other shapes."""
    kept = stream_launcher.BLOCKS
    for n, b, precision in ((2, 32768, "bf16"), (6, 48, "bf16"), (6, 48, "tf32"), (6, 64, "bf16")):
        stream = Stream.of(n, b, precision)
        stream.forward()

        def run(block: tuple[int, int], stream: Stream = stream) -> None:
            stream_launcher.BLOCKS = (block, block)
            stream.backward()

        times = under_load({str(block): (lambda block=block: run(block)) for block in BLOCKS}, turns=2)
        report(f"backward N={n} B={b} {precision}", times, 3 * stream.flops, roofs[precision])
        stream_launcher.BLOCKS = kept


def loss(n: int, b: int, precision: str, scale: float, how: str | None) -> tuple[Callable[[], Tensor], list[Tensor]]:
    xs = rows(n, b)
    fast = {"similarity": "mip", "precision": precision, "backend": "triton", "logit_scale": scale, "normalize": how}
    return lambda: nway_loss(xs, objective="full", **fast), xs  # type: ignore[call-overload, no-any-return]


def steps(roofs: dict[str, float]) -> None:
    """Whole losses, as `gpu_nway.py` times them, and the kernels of one of each."""
    problems = {
        "CLIP B=32768": (2, 32768, "bf16", 20.0, None), "CLIP B=32768 l2": (2, 32768, "bf16", 20.0, "l2"),
        "CLIP B=32768 l2 scale 100": (2, 32768, "bf16", 100.0, "l2"),
        "CLIP B=32768 tf32": (2, 32768, "tf32", 20.0, None),
        "mip N=6 B=48": (6, 48, "bf16", 1 / 15, "rms"), "mip N=6 B=64": (6, 64, "bf16", 1 / 15, "rms"),
        "mip N=6 B=64 tf32": (6, 64, "tf32", 1 / 15, "rms"),
    }  # fmt: skip
    for name, (n, b, precision, scale, how) in problems.items():
        run, leaves = loss(n, b, precision, scale, how)
        median, least, queued, peak = measure(run, leaves, 1.0)
        rate = 8.0 * float(b) ** n * WIDTH / float(median) / 1e9
        share = f"{rate:.0f} TFLOP/s, {100 * rate / roofs[precision]:.0f} % of the roof"
        say(f"{name}: {median:.2f} ms (least {least:.2f}, queued {queued:.2f}), {share}, peak {peak:.3f} GiB")
        if n == 2:
            table(run, leaves)


def table(run: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    """The kernels of one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for x in leaves:
            x.grad = None
        run().backward()
        torch.cuda.synchronize()
    found = sorted(
        (e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA), key=lambda e: e.time_range.start
    )
    total, count = defaultdict(float), defaultdict(int)
    for e in found:
        total[e.name] += e.time_range.elapsed_us()
        count[e.name] += 1
    begun = found[0].time_range.start
    print(f"    {len(found)} kernels, busy {sum(total.values()):.0f} us of {found[-1].time_range.end - begun:.0f}")
    for name in sorted(total, key=total.__getitem__, reverse=True)[:12]:
        first = min(e.time_range.start for e in found if e.name == name) - begun
        print(f"    {total[name]:8.1f} us {count[name]:4}x from {first:6.0f}  {name[:100]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", nargs=3, help=argparse.SUPPRESS)
    for name in ("kernels", "blocks", "steps"):
        parser.add_argument(f"--{name}", action="store_true")
    given = parser.parse_args()
    if given.job:
        kernel, precision, number = given.job
        print(check(kernel, precision, CANDIDATES[kernel, precision][int(number)]))
        return
    parts = {"kernels": kernels, "blocks": blocks, "steps": steps}
    chosen = [part for name, part in parts.items() if getattr(given, name)] or list(parts.values())
    roofs = {precision: matmul_rate(precision) for precision in ("bf16", "tf32")}
    for part in chosen:
        part(roofs)


if __name__ == "__main__":
    main()
