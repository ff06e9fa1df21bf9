"""Every way to an N-way contrastive loss in one run: CPU seconds, memory, speed, and whether they agree.

    python benchmarks/nway.py [--quick] [--repeat 5] [--memory-gb 12] [--out FILE]

Forward and backward in float32 at D = 512, the normalisation of the rows included, one thread, each way in a process
of its own. Seconds are processor time, the least of up to five runs, or up to fifty where they take milliseconds (so
that other programs on the machine count little); memory is how far the peak resident set rose above what the process
held before (VmHWM, which unlike ru_maxrss does not remember the parent). What would need more memory than allowed is
not run: its estimate is shown. Agreement is the relative difference of loss and gradient from the first way of the
same problem that ran. GFLOP/s counts the matrix products a way needs, not what it wastes. Ways by hand are in
`nway_ways.py`. On a GPU, `gpu_nway.py` measures the kernels; with CUDA here, it is run as well.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from nway_ways import CLIP, Entry, entries

if TYPE_CHECKING:
    from torch import Tensor

SIZES = [(24, 4), (16, 5), (12, 6), (20, 6)]
CLIP_BATCH = 2048
WIDTH = 512
PATIENCE_S = 8.0
BRIEF_S = 0.3
SCALES = {"mip full": 1 / 15, "norm full": 4.0, "paircos full": 1 / 0.07, "norm axis": 4.0, CLIP: 1 / 0.07}


def peak_bytes() -> int:
    """The highest resident set of this process so far."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure(index: int, b: int, n: int, repeat: int, folder: Path) -> dict[str, float]:
    """One way in this process: least CPU seconds, rise of the peak, loss; the gradient goes to a file."""
    import torch

    torch.set_num_threads(1)
    entry = entries()[index]
    draw = torch.Generator().manual_seed(0)
    shared = torch.randn(b, WIDTH, generator=draw)
    scale = SCALES[entry.problem]
    xs = [shared + torch.randn(b, WIDTH, generator=draw) for _ in range(n)]
    length = 1.0
    if entry.problem == "mip full":  # rows of root mean square 1 and the mean over the width
        length, scale = math.sqrt(WIDTH), scale / WIDTH

    def once(leaves: list[Tensor]) -> Tensor:
        loss = entry.run([x * (length / x.norm(dim=-1, keepdim=True)) for x in leaves], scale)
        loss.backward()
        return loss.detach()

    once([torch.randn(4, WIDTH, generator=draw, requires_grad=True) for _ in range(n)])  # imports are nobody's memory
    xs = [x.requires_grad_() for x in xs]
    before = peak_bytes()
    least, began, runs = math.inf, time.process_time(), 0
    while runs < repeat or (runs < 10 * repeat and time.process_time() - began < BRIEF_S):
        for x in xs:
            x.grad = None
        start = time.process_time()
        loss = once(xs)
        least, runs = min(least, time.process_time() - start), runs + 1
        if time.process_time() - began > PATIENCE_S:
            break
    torch.save(torch.stack([x.grad for x in xs if x.grad is not None]), folder / "grad.pt")
    return {"s": least, "bytes": peak_bytes() - before, "loss": float(loss)}


def run_all(
    sizes: list[tuple[int, int]], repeat: int, limit_gb: float
) -> list[tuple[Entry, int, int, dict[str, float]]]:
    """Every entry that fits at every size, each in a fresh process."""
    rows: list[tuple[Entry, int, int, dict[str, float]]] = []
    for b, n in sizes:
        for index, entry in enumerate(entries()):
            if (entry.problem == CLIP) != (n == 2):
                continue
            need = entry.memory(b, n, WIDTH) if entry.memory is not None else 0.0
            if need > limit_gb * 1e9:
                rows.append((entry, b, n, {"need": need}))
                continue
            with tempfile.TemporaryDirectory() as folder:
                command = [
                    sys.executable,
                    __file__,
                    "--one",
                    str(index),
                    str(b),
                    str(n),
                    folder,
                    "--repeat",
                    str(repeat),
                ]
                env = {**os.environ, "OMP_NUM_THREADS": "1"}
                done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
                if done.returncode:
                    said = (done.stderr.strip().splitlines() or ["killed"])[-1]
                    print(f"{entry.problem} / {entry.name} at B={b} N={n}: {said}", file=sys.stderr)
                    rows.append((entry, b, n, {"failed": float(done.returncode)}))
                    continue
                result = json.loads(done.stdout)
                compare(result, entry, b, n, Path(folder))
            rows.append((entry, b, n, result))
            print(f"B={b} N={n} {entry.problem} / {entry.name}: {result['s']:.4f} s", file=sys.stderr, flush=True)
    return rows


REFERENCES: dict[tuple[str, int, int], tuple[float, object]] = {}


def compare(result: dict[str, float], entry: Entry, b: int, n: int, folder: Path) -> None:
    """Add the relative differences of loss and gradient from the first way of this problem and size."""
    import torch

    grad = torch.load(folder / "grad.pt")
    loss, reference = REFERENCES.setdefault((entry.problem, b, n), (result["loss"], grad))
    assert isinstance(reference, torch.Tensor)
    result["loss_off"] = abs(result["loss"] - loss) / abs(loss)
    result["grad_off"] = float((grad - reference).norm() / reference.norm())


def describe(rows: list[tuple[Entry, int, int, dict[str, float]]]) -> str:
    """The table, and the ratios that were promised."""
    lines = ["| B, N | problem | way | CPU s | peak MB | GFLOP/s | M tuples/s | loss | loss off | gradient off |"]
    lines += ["|---|---|---|---|---|---|---|---|---|---|"]
    for entry, b, n, got in rows:
        head = f"| {b}, {n} | {entry.problem} | {entry.name} |"
        if "need" in got:
            lines.append(f"{head} not run | needs about {got['need'] / 1e6:,.0f} | | | | | |")
        elif "failed" in got:
            lines.append(f"{head} failed | | | | | | |")
        else:
            speed = f"{entry.flops(b, n, WIDTH) / got['s'] / 1e9:.1f}" if entry.flops is not None else ""
            tuples = f"{b**n / got['s'] / 1e6:,.1f}" if "axis" not in entry.problem else ""
            lines.append(
                f"{head} {got['s']:.4f} | {got['bytes'] / 1e6:,.1f} | {speed} | {tuples} | {got['loss']:.6g} "
                f"| {got['loss_off']:.0e} | {got['grad_off']:.0e} |"
            )
    lines += ["", "| B, N | problem | fastest of trimtab | against | times faster | times less memory |"]
    lines += ["|---|---|---|---|---|---|"]
    for b, n, problem in dict.fromkeys((b, n, entry.problem) for entry, b, n, _ in rows):
        group = [(e, got) for e, bb, nn, got in rows if (bb, nn, e.problem) == (b, n, problem) and "s" in got]
        mine = [(e, got) for e, got in group if e.name.startswith("trimtab")]
        if not mine:
            continue
        best, least = min(mine, key=lambda pair: pair[1]["s"])
        for e, got in group:
            if not e.name.startswith("trimtab"):
                less = got["bytes"] / max(least["bytes"], 1e5)
                faster = got["s"] / least["s"]
                lines.append(f"| {b}, {n} | {problem} | {best.name} | {e.name} | {faster:,.1f} | {less:,.1f} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description="Every way to an N-way loss, on the CPU.")
    parser.add_argument("--quick", action="store_true", help="the two smaller sizes, two runs each")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--memory-gb", type=float, default=12.0, help="skip what is estimated to need more")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--one", nargs=4, metavar=("INDEX", "B", "N", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        index, b, n, folder = given.one
        print(json.dumps(measure(int(index), int(b), int(n), given.repeat, Path(folder))))
        return
    sizes, repeat = (SIZES[:2], 2) if given.quick else ([*SIZES, (CLIP_BATCH, 2)], given.repeat)
    text = describe(run_all(sizes, repeat, given.memory_gb))
    if given.out is not None:
        given.out.write_text(text, encoding="utf-8")
    print(text)
    import torch

    gpu = Path(__file__).with_name("gpu_nway.py")
    if torch.cuda.is_available() and gpu.exists():
        sys.exit(subprocess.run([sys.executable, str(gpu)], check=False).returncode)
    print("No GPU here: benchmarks/gpu_nway.py measures the kernels where there is one.", file=sys.stderr)


if __name__ == "__main__":
    main()
