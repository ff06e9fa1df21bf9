"""Saving and loading checkpoints beside torch.save, torch.load and torch.distributed.checkpoint, in one run.

    python benchmarks/checkpoint.py [--mb 300] [--rounds 9] [--quiet 20] [--folder DIR]

A model with AdamW's two moments. The ways take turns, each on new files of its own; medians, and the ratio to the first
way within a round. Every save ends on the disk (fsync). What is loaded is in the page cache for all, and every value of
it is read once (a sum), because a mapped file is not loaded before that; "without" leaves that out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from trimtab import Checkpointer
from trimtab.checkpoint import directory
from trimtab.checkpoint.format import container

State = dict[str, Any]


def make_state(megabytes: int) -> State:
    """Blocks of a transformer of width 512: four large matrices, biases and norms, and two moments of each."""
    shapes = [(1536, 512), (512, 512), (2048, 512), (512, 2048), (2048,), (512,), (512,), (512,)]
    block_bytes = 3 * 4 * sum(torch.Size(shape).numel() for shape in shapes)
    blocks = max(1, round(megabytes * 1e6 / block_bytes))
    model = {f"blocks.{b}.{i}": torch.randn(shape) for b in range(blocks) for i, shape in enumerate(shapes)}
    moments = {
        i: {"step": torch.tensor(10.0), "exp_avg": torch.randn_like(p), "exp_avg_sq": torch.rand_like(p)}
        for i, p in enumerate(model.values())
    }
    groups = [{"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(len(model)))}]
    return {"model": model, "optimizer": {"state": moments, "param_groups": groups}}


def tensors_of(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def save_torch(state: State, folder: Path) -> None:
    path = folder / "torch.pt"
    torch.save(state, path)
    sync(path)


def save_dcp(state: State, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True, overwrite=True))


def save_ours(state: State, folder: Path) -> None:
    container.write(folder, directory.name_of(1), state, step=1)


def load_torch(state: State, folder: Path) -> State:
    loaded: State = torch.load(folder / "torch.pt", weights_only=True)
    return loaded


def load_mapped(state: State, folder: Path) -> State:
    loaded: State = torch.load(folder / "torch.pt", weights_only=True, mmap=True)
    return loaded


def load_dcp(state: State, folder: Path) -> State:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder / "dcp")
    return state


def load_unverified(state: State, folder: Path) -> State:
    return container.read(folder / directory.name_of(1), verify=False).sections


def load_verified(state: State, folder: Path) -> State:
    return container.read(folder / directory.name_of(1), verify=True).sections


def hash_files(state: State, folder: Path) -> State:
    """One pass of SHA-256 over what ours wrote, in one thread."""
    buffer = bytearray(1 << 20)
    for path in (folder / directory.name_of(1)).glob("*.safetensors"):
        digest = hashlib.sha256()
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    return {}


SAVES: dict[str, Callable[[State, Path], None]] = {
    "torch.save, fsync": save_torch,
    "DCP, sync_files": save_dcp,
    "trimtab (SHA-256, fsync)": save_ours,
}
TARGETS = dict(zip(SAVES, ("torch.pt", "dcp", directory.name_of(1)), strict=True))
LOADS: dict[str, Callable[[State, Path], State]] = {
    "torch.load": load_torch,
    "torch.load, mmap": load_mapped,
    "DCP": load_dcp,
    "trimtab, unverified": load_unverified,
    "trimtab, verified": load_verified,
    "one SHA-256 pass": hash_files,
}


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def busy_frac(seconds: float = 0.5) -> float:
    """How busy all processors are (Linux; 0 elsewhere)."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    before = [int(number) for number in stat.read_text().split("\n")[0].split()[1:9]]
    time.sleep(seconds)
    after = [int(number) for number in stat.read_text().split("\n")[0].split()[1:9]]
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return 1 - (spent[3] + spent[4]) / max(1, sum(spent))


def wait_for_quiet(limit_s: float) -> float:
    """Wait until the machine is less than a fifth busy with others, at most `limit_s`; how busy it was at last."""
    end = time.monotonic() + limit_s
    while (busy := busy_frac()) > 0.2 and time.monotonic() < end:
        pass
    return busy


def row(name: str, times: dict[str, list[float]], reference: str, megabytes: float) -> str:
    middle = statistics.median(times[name])
    ratio = statistics.median(t / r for t, r in zip(times[name], times[reference], strict=True))
    low, high = min(times[name]), max(times[name])
    return f"| {name} | {middle:.3f} | {low:.3f} to {high:.3f} | {megabytes / middle:.0f} | {ratio:.2f} |"


def stalls(megabytes: int, rounds: int, folder: Path) -> str:
    """How long `Checkpointer.save` keeps training waiting, at once and in the background."""
    width = 1024
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(max(1, megabytes // 12))))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.zero_grad()
    ways = {
        "Checkpointer.save": Checkpointer(folder / "now", keep_last=1),
        "the same, asynchronous": Checkpointer(folder / "later", keep_last=1, asynchronous=True),
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 2):  # fresh memory at first
        for way, ckpt in ways.items():
            os.sync()
            seconds, _ = timed(lambda ckpt=ckpt, n=number: ckpt.save(n, model=model, optimizer=optimizer))
            times[way].append(seconds)
            ckpt.wait()
    size = 3 * sum(p.nbytes for p in model.parameters()) / 1e6
    kept = {way: seconds[2:] for way, seconds in times.items()}
    return "\n".join(row(way, kept, "Checkpointer.save", size) for way in kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--quiet", type=float, default=0, help="before each way, wait so many seconds for a quiet machine"
    )
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    state = make_state(options.mb)
    scratch = make_state(options.mb)  # DCP loads in place
    megabytes = sum(t.nbytes for t in tensors_of(state)) / 1e6
    saves: dict[str, list[float]] = {name: [] for name in SAVES}
    loads: dict[str, list[float]] = {name: [] for name in LOADS}
    touched: dict[str, list[float]] = {name: [] for name in LOADS}
    busy = []
    with tempfile.TemporaryDirectory(prefix="trimtab-checkpoint-", dir=options.folder) as name:
        folder = Path(name)
        for number in range(options.rounds + 1):  # the first round warms up
            order = list(SAVES.items())
            for way, save in order[number % 3 :] + order[: number % 3]:
                target = folder / TARGETS[way]
                shutil.rmtree(target, ignore_errors=True)
                target.unlink(missing_ok=True)
                os.sync()
                busy.append(wait_for_quiet(options.quiet))
                seconds, _ = timed(lambda save=save: save(state, folder))
                saves[way].append(seconds)
            for way, load in LOADS.items():
                busy.append(wait_for_quiet(options.quiet))
                seconds, loaded = timed(lambda load=load: load(scratch, folder))
                more, _ = timed(lambda loaded=loaded: [tensor.sum() for tensor in tensors_of(loaded)])
                loads[way].append(seconds)
                touched[way].append(seconds + more)
                del loaded
    for table in (saves, loads, touched):
        for times in table.values():
            del times[0]
    print(f"torch {torch.__version__}, {len(tensors_of(state))} tensors, {megabytes:.0f} MB, {options.rounds} rounds.")
    middle, most = 100 * statistics.median(busy), 100 * max(busy)
    print(f"Busy with others before each: {middle:.0f} % (median), {most:.0f} % at most.\n")
    heading = "| way | median s | range | MB/s | ratio to the first, median of rounds |\n|---|---|---|---|---|"
    for title, times in (("save", saves), ("load, and read every value", touched), ("load without", loads)):
        print(f"**{title}**\n\n{heading}")
        print("\n".join(row(way, times, next(iter(times)), megabytes) for way in times))
        print()
    with tempfile.TemporaryDirectory(prefix="trimtab-checkpoint-", dir=options.folder) as name:
        print(f"**stall of a training that saves ({torch.get_num_threads()} threads)**\n\n{heading}")
        print(stalls(options.mb, options.rounds, Path(name)))


if __name__ == "__main__":
    main()
