"""Find the block shapes of the statistics kernel on this GPU: kernel time over `torch.sum` of the same bytes.

PYTHONPATH=src python benchmarks/tune_stats.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch

from trimtab.sample.measure import triton_launch as measure_triton
from trimtab.sample.measure.reference import Limits
from trimtab.sample.measure.triton_launch import Plan

SHAPES = [(1024, 16, 4), (1024, 32, 4), (1024, 64, 4), (2048, 16, 8), (2048, 32, 8), (512, 64, 4), (512, 64, 2)]
SHAPES += [(1024, 32, 8), (1024, 32, 2), (2048, 16, 4), (2048, 64, 8)]


def milliseconds(function: Callable[[], object], repeats: int = 15, inner: int = 10) -> float:
    for _ in range(3):
        function()
    out = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(inner):
            function()
        end.record()
        torch.cuda.synchronize()
        out.append(start.elapsed_time(end) / inner)
    return statistics.median(out)


def gpt(width: int, depth: int) -> list[tuple[int, ...]]:
    shapes: list[tuple[int, ...]] = [(50257, width), (1024, width)]
    for _ in range(depth):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,), (width,), (width,)]
        shapes += [(4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [*shapes, (width,), (width,)]


def main() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [torch.randn(s, device="cuda").mul_(1e-3).to(dtype) for s in gpt(1024, 24)]
        size = sum(t.numel() * t.element_size() for t in tensors)
        flat = torch.randn(size // 4, device="cuda")
        floor = milliseconds(partial(torch.sum, flat))
        print(f"{dtype}: {size / 1e9:.2f} GB, torch.sum {floor:.3f} ms = {size / floor / 1e9:.2f} TB/s")
        rows = []
        for shape in SHAPES:
            measure_triton._TUNED[dtype] = shape
            plan = Plan(tensors, None, len(tensors))
            addresses = [t.data_ptr() for t in tensors]
            rows.append((milliseconds(partial(plan.run, tensors, addresses, Limits())), shape))
        for ms, shape in sorted(rows)[:6]:
            print(f"  block {shape[0]:5d} x {shape[1]:2d}, {shape[2]:2d} warps: {ms:.3f} ms, {ms / floor:.3f}x")
        del tensors, flat
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
