"""What gradient and weight histograms cost: `trimtab.log_histograms` beside `wandb.watch`, in one run.

    python benchmarks/histograms.py

One thread. Three trainings of the same model take turns, in blocks of steps: without histograms, with `wandb.watch`
(`log="all"`) and with `trimtab.log_histograms`. Each logs its loss to an offline wandb run of its own at every step.
The fastest block of each counts. Time of the training thread is what a step waits for; time of the process has the
threads of loggers in it, too, but not the process that wandb starts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import trimtab

ARMS = ("no histograms", "wandb.watch", "trimtab.log_histograms")


def transformer() -> tuple[nn.Module, Tensor]:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), torch.randn(4, 32, 128)


def wide() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)), torch.randn(32, 1024)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {"transformer": transformer, "wide": wide}


class Training:
    """One model, its optimizer and its wandb run."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Tensor]], arm: str, every: int) -> None:
        import wandb

        torch.manual_seed(0)
        self.model, self.x = make()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        # wandb.watch logs to the global run, which is the first one.
        reinit = "default" if arm == "wandb.watch" else "create_new"
        self.run: Any = wandb.init(project="histograms", mode="offline", reinit=reinit)
        self.handle: trimtab.integrations.loggers.HistogramLog | None = None
        if arm == "wandb.watch":
            self.run.watch(self.model, log="all", log_freq=every)
        elif arm == "trimtab.log_histograms":
            self.handle = trimtab.log_histograms(self.model, self.run, every=every)

    def block(self, num: int) -> tuple[float, float]:
        """Milliseconds per step: of this thread, of the process."""
        thread, process = time.thread_time(), time.process_time()
        for _ in range(num):
            loss = self.model(self.x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.run.log({"loss": float(loss.detach())})
        return (time.thread_time() - thread) * 1e3 / num, (time.process_time() - process) * 1e3 / num

    def close(self) -> None:
        if self.handle is not None:
            self.handle.close()
        self.run.finish()


def measure(name: str, every: int, blocks: int, steps: int) -> None:
    trainings = {arm: Training(MODELS[name], arm, every) for arm in sorted(ARMS, key=lambda arm: arm != "wandb.watch")}
    for training in trainings.values():
        training.block(max(every, 5))
    times: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for turn in range(blocks):
        for i in range(len(ARMS)):
            arm = ARMS[(i + turn) % len(ARMS)]
            times[arm].append(trainings[arm].block(steps))
    parameters = list(trainings[ARMS[0]].model.parameters())
    for training in trainings.values():
        training.close()
    fastest = {arm: [min(pair[i] for pair in times[arm]) for i in (0, 1)] for arm in ARMS}
    base = fastest[ARMS[0]]
    size = f"{name}, {sum(p.numel() for p in parameters) / 1e6:.1f} M in {len(parameters)} tensors"
    for arm in ARMS:
        cells = [
            f"{mine:.2f} ({(mine / plain - 1) * 100:+.1f} %)" for mine, plain in zip(fastest[arm], base, strict=True)
        ]
        print(f"| {size} | {every} | {arm} | {cells[0]} | {cells[1]} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10])
    given = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["WANDB_SILENT"] = "true"
    import wandb

    print(f"torch {torch.__version__}, wandb {wandb.__version__}, CPU, one thread; fastest of {given.blocks} blocks\n")
    print("| model | every | histograms by | ms per step, training thread | ms per step, process |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WANDB_DIR"] = folder
        for name in MODELS:
            for every in given.every:
                measure(name, every, given.blocks, max(every, 10))


if __name__ == "__main__":
    main()
