"""Where the time of a step of the Triton stream goes on a card, and what other tiles, strips and blocks would take.

    PYTHONPATH=src python benchmarks/gpu_nway_tune.py

Steps are forward + backward with the normalisation, as in `gpu_nway.py`: `wait` with the host waiting after each,
`queued` ten in a row, `forward` ten forward passes in a row.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import pstats
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from trimtab.losses import nway_loss
from trimtab.losses.triton import stream_launcher

sys.path.insert(0, str(Path(__file__).parent))
from gpu_nway import matmul_rate, measure
from gpu_nway_checks import DEVICE, errors, rows

BASE = dict(stream_launcher.TILES)
JOBS = (
    ("mip", 6, 8, 0.1, "bf16"), ("mip", 2, 1000, 20.0, "bf16"), ("mip", 2, 3000, 20.0, "ieee"),
    ("mip", 2, 1000, 1000.0, "ieee"), ("norm", 3, 40, 10.0, "ieee"), ("paircos", 3, 40, 10.0, "bf16"),
    ("mip", 5, 11, 0.2, "bf16"), ("mip", 6, 8, 50.0, "bf16"),
)  # fmt: skip
BEGUN = time.monotonic()


def say(text: str = "") -> None:
    print(f"[{time.monotonic() - BEGUN:5.1f}] {text}", flush=True)


def clip(b: int = 32768, *, how: str | None = "l2", scale: float = 20.0) -> tuple[Callable[[], Tensor], list[Tensor]]:
    xs = rows(2, b)
    fast = {"similarity": "mip", "precision": "bf16", "backend": "triton", "logit_scale": scale, "normalize": how}
    return lambda: nway_loss(xs, objective="full", **fast), xs  # type: ignore[call-overload, no-any-return]


def six(b: int = 32) -> tuple[Callable[[], Tensor], list[Tensor]]:
    xs = rows(6, b)
    fast = {"similarity": "mip", "precision": "bf16", "backend": "triton", "logit_scale": 1 / 15}
    return lambda: nway_loss(xs, objective="full", **fast), xs  # type: ignore[call-overload, no-any-return]


def use(strip: int = 32, group: int = 16) -> None:
    """Settings of the stream, by hand."""
    for key in (("forward", "bf16"), ("weights", "bf16")):
        stream_launcher.TILES[key] = replace(BASE[key], strip=strip)
    stream_launcher.GROUP = group


def queued(run: Callable[[], Tensor], leaves: list[Tensor], count: int = 10, *, backward: bool = True) -> float:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(count):
        for x in leaves:
            x.grad = None
        if backward:
            run().backward()
        else:
            with torch.no_grad():
                run()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / count


def variant(name: str, run: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    try:
        queued(run, leaves, 2)
        forward = statistics.median(queued(run, leaves, backward=False) for _ in range(3))
        both = statistics.median(queued(run, leaves) for _ in range(3))
        say(f"  {name:44} forward {forward:6.3f}  queued {both:6.3f}")
    except Exception as error:
        say(f"  {name:44} {type(error).__name__}: {str(error)[:150]}")


def table(title: str, run: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    """Kernels of one step that nobody waits inside of, and the gaps between them."""
    for _ in range(3):
        queued(run, leaves, 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        queued(run, leaves, 1)
    found = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda e: e.time_range.start)
    total, count = defaultdict(float), defaultdict(int)
    for e in found:
        total[e.name] += e.time_range.elapsed_us()
        count[e.name] += 1
    begin = found[0].time_range.start
    say(f"{title}: {len(found)} kernels, busy {sum(total.values()):.0f} us of {found[-1].time_range.end - begin:.0f}")
    for name in sorted(total, key=total.__getitem__, reverse=True)[:14]:
        print(f"    {total[name]:8.1f} us {count[name]:4}x  {name[:110]}")
    gaps = sorted(
        ((b.time_range.start - a.time_range.end, a, b) for a, b in pairwise(found)),
        key=lambda gap: -gap[0],
    )
    for gap, a, b in gaps[:5]:
        print(f"    gap {gap:6.1f} us at {a.time_range.end - begin:.0f}: {a.name[:40]} -> {b.name[:40]}", flush=True)


def host(title: str, run: Callable[[], Tensor], leaves: list[Tensor]) -> None:
    """How long the host is busy, with nothing in front of it on the device."""
    ahead, behind = [], []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = run()
        middle = time.perf_counter()
        loss.backward()
        ahead.append(1e3 * (middle - start))
        behind.append(1e3 * (time.perf_counter() - middle))
        torch.cuda.synchronize()
        for x in leaves:
            x.grad = None
    say(f"{title}: host forward {statistics.median(ahead):.3f} ms, backward {statistics.median(behind):.3f} ms")


def right(job: int) -> None:
    from trimtab.losses.problem import make_problem

    if job < len(JOBS):
        name, n, b, c, precision = JOBS[job]

        def problem(leaves, scale):  # type: ignore[no-untyped-def]
            return replace(make_problem(leaves, name, logit_scale=scale), precision=precision)

        say(f"  {name} N={n} B={b} scale {c:g} {precision}: {errors('triton_stream', problem, rows(n, b), c)}")
        return
    # The whole loss, normalisation and factor in the gradient, against float64; and twice the same, without a wait.
    xs = [3 * x.detach() + 0.1 for x in rows(2, 3000)]
    for c in (20.0, 100.0):
        found = []
        for dtype, backend in ((torch.float32, "triton"), (torch.float64, "materialize")):
            leaves = [x.to(dtype).requires_grad_() for x in xs]
            scale = torch.tensor(c, device=DEVICE, dtype=dtype, requires_grad=True)
            precision = "bf16" if backend == "triton" else "auto"
            loss = nway_loss(
                leaves, similarity="mip", objective="full", normalize="l2", logit_scale=scale, backend=backend,
                precision=precision,
            )  # fmt: skip
            grads = torch.autograd.grad(loss, [*leaves, scale])
            found.append([loss.detach().double()] + [g.double() for g in grads])
        off = [float((a - b).norm() / b.norm()) for a, b in zip(*found, strict=True)]
        say(f"  CLIP loss B=3000 scale {c:g}: loss, gradients, d scale off by " + ", ".join(f"{x:.1e}" for x in off))
    run, leaves = clip(4096)
    run().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    for x in leaves:
        x.grad = None
    run().backward()
    torch.cuda.set_sync_debug_mode("default")
    first = [x.grad.clone() for x in leaves]
    for x in leaves:
        x.grad = None
    run().backward()
    same = all(torch.equal(a, x.grad) for a, x in zip(first, leaves, strict=True))
    say(f"  no host wait in a whole step; equal bits: {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--job", type=int, help="one check, or what must be compiled")
    given = parser.parse_args()
    if given.job is not None and given.job <= len(JOBS):
        right(given.job)
        return
    if given.job is not None:
        run, _ = clip(8192) if given.job % 2 else six()
        run().backward()
        torch.cuda.synchronize()
        return
    here = [sys.executable, __file__, "--job"]
    for job in [subprocess.Popen([*here, str(i)]) for i in range(len(JOBS) + 3)]:
        job.wait()
    say(f"compiled; a bf16 product runs at {matmul_rate():.0f} TFLOP/s")
    problems = {
        "CLIP l2": clip(), "CLIP l2 scale 100": clip(scale=100.0), "CLIP given": clip(how=None), "mip N=6 B=32": six(),
        "mip N=6 B=16": six(16), "mip N=6 B=48": six(48),
    }  # fmt: skip
    for name, (run, leaves) in problems.items():
        median, least, ten, peak = measure(run, leaves, 0.5)
        say(f"{name}: wait {median:.2f} (least {least:.2f}), queued {ten:.2f}, peak {peak:.3f} GiB")
        if name != "mip N=6 B=48":
            host(name, run, leaves)
    for name in ("CLIP l2", "CLIP l2 scale 100", "mip N=6 B=32"):
        table(name, *problems[name])
    run, leaves = problems["mip N=6 B=16"]
    with cProfile.Profile() as calls:
        for _ in range(30):
            run().backward()
    torch.cuda.synchronize()
    for order in ("tottime", "cumtime"):
        text = io.StringIO()
        pstats.Stats(calls, stream=text).sort_stats(order).print_stats(45)
        print("\n".join(line for line in text.getvalue().splitlines()[4:] if line.strip()), flush=True)
    run, leaves = six(64)
    for strip, group in ((32, 16), (16, 32)):
        use(strip, group)
        queued(run, leaves, 1)
        say(f"mip N=6 B=64 group {group} strip {strip}: {queued(run, leaves, 2):.1f} ms")
    for name in ("CLIP l2", "mip N=6 B=32"):
        for strip, group in ((32, 8), (32, 16), (16, 16), (32, 32), (24, 16)):
            use(strip=strip, group=group)
            variant(f"{name} group {group} strip {strip}", *problems[name])


if __name__ == "__main__":
    main()
