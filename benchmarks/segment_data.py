"""Memory and speed of `trimtab train segment --data`: 6,000 pictures of 384 x 384, read by two workers.

    python benchmarks/segment_data.py --out benchmarks/results/segment_data_cpu2_DATE.md

Generates the pictures in a temporary folder, builds the recipe as its command does, and reads one epoch in batches
of 8 with a pause of 200 ms for each step. Reports the resident memory of the process and its workers (shared pages
counted once, from /proc) beyond what the model alone takes, whether a batch lay ready when the step asked for it, and
how long the step then took to get it: taking over a ready batch of 19 MB from a worker takes a few milliseconds itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from trimtab.data import load_textures
from trimtab.train.recipe import build_parts, settings_of
from trimtab.train.recipes import load_recipe
from trimtab.train.recipes.segment.data import outline
from trimtab.train.trainer import readable

LIMIT_MB, PAUSE_S = 2000.0, 0.2


def make_pictures(root: Path, num: int, side: int) -> None:
    """JPEG pictures of textures with an object in each, and PNG masks, in the layout of COD10K."""
    sources = [one if one.ndim == 3 else np.repeat(one[..., None], 3, 2) for one in load_textures().values()]
    rng = np.random.default_rng(0)
    grounds = [np.asarray(Image.fromarray(one).resize((2 * side, 2 * side))) for one in sources]
    for split, share in (("Train", num), ("Test", max(num // 60, 2))):
        images, masks = root / split / "Image", root / split / "GT_Object"
        images.mkdir(parents=True)
        masks.mkdir(parents=True)
        for i in range(share):
            under, over = (grounds[j] for j in rng.choice(len(grounds), 2, replace=False))
            y, x = rng.integers(side, size=2)
            mask = outline(side, rng)
            picture = np.where(mask[..., None], over[x : x + side, y : y + side], under[y : y + side, x : x + side])
            Image.fromarray(picture.astype(np.uint8)).save(images / f"{i:05}.jpg", quality=90)
            Image.fromarray(mask.astype(np.uint8) * 255).save(masks / f"{i:05}.png")


def resident_mb(pids: Sequence[int]) -> float:
    """The memory of these processes, shared pages divided among those that share them."""
    total = 0
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1])
    return total / 1000.0


def children(pid: int) -> list[int]:
    """The processes that this one started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(one) for one in found.split()]


def is_ready(loader: Any) -> bool:
    """Whether a worker has delivered the next batch already."""
    inner = loader._inner._iterator  # kept, as the workers are
    return len(inner._task_info.get(inner._rcvd_idx, ())) == 2 or not inner._worker_result_queue.empty()


def measure(folder: Path, *, side: int, workers: int, most: int) -> dict[str, float]:
    """One epoch of the recipe's own loader."""
    recipe = load_recipe("segment")
    build_parts(recipe, settings_of(recipe, {"num_images": 2, "img_size": 16}))  # everything imported
    alone = resident_mb([os.getpid()])
    began = time.perf_counter()
    given = {"data": str(folder), "img_size": side, "batch_size": 8, "num_workers": workers}
    parts = build_parts(recipe, settings_of(recipe, given))
    build_s = time.perf_counter() - began
    waits, own, ready, peak, done = [], [], [], 0.0, 0
    asked, used = time.perf_counter(), time.thread_time()
    lay_ready = False
    loader = readable(parts.train_loader)
    for batch in loader:
        waits.append(1000.0 * (time.perf_counter() - asked))
        own.append(1000.0 * (time.thread_time() - used))
        ready.append(lay_ready)
        done += len(batch[0])
        if len(waits) % 10 == 0:
            peak = max(peak, resident_mb([os.getpid(), *children(os.getpid())]))
        time.sleep(PAUSE_S)
        lay_ready = is_ready(loader)
        asked, used = time.perf_counter(), time.thread_time()
        if len(waits) >= most:
            break
    first, rest = waits[0], np.array(waits[1:])
    return {
        "pictures in the folder": float(len(parts.train_loader.dataset) + len(parts.val_loader.dataset)),
        "pictures read": float(done),
        "start: files found, headers compared, s": build_s,
        "model alone, MB": alone,
        "peak with all pictures, workers included, MB": peak,
        "beyond the model, MB": peak - alone,
        "wait for the first batch, ms": first,
        "batches that lay ready when asked for, %": 100.0 * float(np.mean(ready[1:])),
        "wait for a batch, median, ms": float(np.median(rest)),
        "of which own processor time, to take it over, median, ms": float(np.median(own[1:])),
        "wait for a batch, 99th percentile, ms": float(np.quantile(rest, 0.99)),
        "share of the epoch spent waiting, %": 100.0
        * float(rest.sum())
        / (float(rest.sum()) + 1000.0 * PAUSE_S * len(rest)),
    }


def main() -> None:
    """Measure, print, and write a page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=6000)
    parser.add_argument("--side", type=int, default=384)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--most", type=int, default=10_000, help="Batches at most.")
    parser.add_argument("--out", type=Path, default=None)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_pictures(Path(folder), args.num, args.side)
        size = sum(one.stat().st_size for one in Path(folder).rglob("*.*")) / 1e6
        found = {"on disk, MB": size, **measure(Path(folder), side=args.side, workers=args.workers, most=args.most)}
    command = f"python benchmarks/segment_data.py --num {args.num} --side {args.side} --workers {args.workers}"
    lines = [
        "# segment on own pictures: memory and speed",
        "",
        f"`{command}` on {os.cpu_count()} CPUs ({platform.machine()}), Python {platform.python_version()}, torch "
        f"{torch.__version__}. The machine was shared: load {os.getloadavg()[0]:.1f} at the end. A step is a pause of "
        f"{1000 * PAUSE_S:.0f} ms; batches of 8.",
        "",
        "| measured | value |",
        "|---|---|",
        *(f"| {name} | {value:,.1f} |" for name, value in found.items()),
        "",
        f"Limit: {LIMIT_MB:,.0f} MB beyond the model: "
        f"{'kept' if found['beyond the model, MB'] <= LIMIT_MB else 'not kept'}.",
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
