"""What the guards of several processes send each other: messages and bytes per step, and how long they take.

    python benchmarks/distributed.py [--ranks 1 2 4 8] [--steps 60]

Counts every all-reduce that trimtab makes (DDP and FSDP make theirs elsewhere), on gloo, in processes of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
WAYS = ("ddp", "ddp, act", "fsdp", "fsdp, act")
LAYERS = (4, 64)
WIDTH = 32
EVERY = 50
"""Steps between two full scans, as a guard has it by default."""


def worker(folder: Path, steps: int) -> None:
    """One process: trains in every way, and rank 0 writes what it sent."""
    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sent: list[tuple[int, float]] = []
    inner: Any = dist.all_reduce

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = inner(tensor, *args, **kwargs)
        sent.append((tensor.numel() * tensor.element_size(), time.perf_counter() - began))
        return out

    dist.all_reduce = counted
    rows = [measured(way, layers, steps, sent) for way in WAYS for layers in LAYERS]
    if dist.get_rank() == 0:
        (folder / "rows.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def measured(way: str, layers: int, steps: int, sent: list[tuple[int, float]]) -> dict[str, Any]:
    """Train for some steps; what was sent in a usual step, and in one with a full scan."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    from trimtab import Guard

    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    num = len(list(model.parameters()))
    if way.startswith("fsdp"):
        fully_shard(model)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    usual: list[tuple[int, int, float]] = []
    full: list[tuple[int, int, float]] = []
    with Guard(model, optimizer, mode="act" if "act" in way else "advise", run_dir=False) as guard:
        for step in range(steps):
            seed = 1000 * step + dist.get_rank()
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))
            loss = (model(x) - x).square().mean()
            loss.backward()
            sent.clear()
            guard.step(loss)
            optimizer.zero_grad()
            one = len(sent), sum(num for num, _ in sent), sum(took for _, took in sent)
            (full if step % EVERY == 0 else usual).append(one)
    return {"way": way, "tensors": num, "usual": _middle(usual[5:]), "full": _middle(full[-1:])}


def _middle(steps: list[tuple[int, int, float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*steps, strict=True)]


def run(ranks: int, steps: int) -> list[dict[str, Any]]:
    """What `ranks` processes of this machine measure."""
    with tempfile.TemporaryDirectory() as folder:
        start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
        command = [sys.executable, *start, "--worker", folder, "--steps", str(steps)]
        done = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500, cwd=ROOT
        )
        if done.returncode:
            raise SystemExit(done.stderr)
        rows: list[dict[str, Any]] = json.loads((Path(folder) / "rows.json").read_text())
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker, args.steps)
        return
    print("| ranks | way | tensors | messages | bytes | ms | messages, full scan | bytes, full scan |")
    print("|---|---|---|---|---|---|---|---|")
    for ranks in args.ranks:
        for row in run(ranks, args.steps):
            (num, size, took), (num_full, size_full, _) = row["usual"], row["full"]
            cells = ranks, row["way"], row["tensors"], f"{num:g}", f"{size:,.0f}", f"{1e3 * took:.2f}"
            print("|", " | ".join(map(str, (*cells, f"{num_full:g}", f"{size_full:,.0f}"))), "|", flush=True)


if __name__ == "__main__":
    main()
