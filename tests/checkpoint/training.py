"""A small trainer with all that a real one has; run as a script it saves as it goes, and can kill itself.

Dropout, BatchNorm, a buffer that no state_dict holds, shuffled and augmented data, accumulation over four micro-batches
that does not end with the epoch, clipping, an average of the weights, validation, and any of three schedules.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import trimtab
from trimtab.checkpoint import state
from trimtab.checkpoint.loader import ResumableLoader

SAMPLES, BATCH, ACCUMULATE, EPOCHS = 44, 4, 4, 4
PER_EPOCH = SAMPLES // BATCH  # 11: the third accumulation of an epoch goes on in the next one
STEPS = EPOCHS * PER_EPOCH // ACCUMULATE

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "onecycle": lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=STEPS + 1),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=STEPS),
    "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5),
}


class Rows(Dataset[tuple[Tensor, Tensor, int]]):
    """Rows of numbers with a target, and noise from every generator there is."""

    def __init__(self) -> None:
        own = torch.Generator().manual_seed(0)
        self.x = torch.randn(SAMPLES, 6, generator=own)
        self.y = self.x[:, :1].sin() + 0.1 * torch.randn(SAMPLES, 1, generator=own)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        noise = torch.randn(6) + random.gauss(0, 1) + float(np.random.randn())
        return self.x[index] + 0.01 * noise, self.y[index], index


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3))
        self.head = nn.Linear(12, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return self.head(self.body(x)) + 1e-3 * self.calls


class Trainer:
    """Everything of one run, built from a seed."""

    def __init__(self, optimizer: str, scheduler: str, workers: int = 0, seed: int = 0) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.data = Rows()
        self.model = Net()
        groups = [{"params": self.model.body.parameters()}, {"params": self.model.head.parameters(), "lr": 0.02}]
        self.optimizer = OPTIMIZERS[optimizer](groups)
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        how: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork"} if workers else {}
        self.loader = ResumableLoader(DataLoader(self.data, batch_size=BATCH, shuffle=True, **how))
        self.progress: dict[str, Any] = {"epoch": 0, "micro": 0, "ids": [], "losses": [], "validated": []}

    def parts(self) -> dict[str, Any]:
        """What a checkpoint is taken of, and put back into."""
        names = ("model", "optimizer", "scheduler", "ema", "loader")
        return {name: getattr(self, name) for name in names} | {"extra": self.progress, "gradients": True}

    def everything(self) -> dict[str, Any]:
        """All that must be the same at the end, bit for bit."""
        return state.capture(**self.parts())

    def run(self, after: Callable[[str], None] = lambda place: None, epochs: int = EPOCHS) -> None:
        """Train to the end; `after` is called after every micro-batch and after every epoch."""
        progress = self.progress
        while progress["epoch"] < epochs:
            for x, y, ids in self.loader:
                self.micro_batch(x, y, ids.tolist())
                after(f"micro {progress['micro']}")
            self.validate()
            progress["epoch"] += 1
            after(f"epoch {progress['epoch']}")

    def micro_batch(self, x: Tensor, y: Tensor, ids: list[int]) -> None:
        loss = nn.functional.mse_loss(self.model(x), y) / ACCUMULATE
        loss.backward()
        self.progress["micro"] += 1
        self.progress["ids"] += ids
        self.progress["losses"].append(loss.item())
        if self.progress["micro"] % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.ema.update_parameters(self.model)
            if not isinstance(self.scheduler, ReduceLROnPlateau):
                self.scheduler.step()

    @torch.no_grad()
    def validate(self) -> None:
        self.model.eval()
        noise = 0.1 * torch.randn(self.data.x.shape)  # validation draws from the same generator
        loss = nn.functional.mse_loss(self.model(self.data.x + noise), self.data.y).item()
        self.model.train()
        self.progress["validated"].append(loss)
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(loss)


def save(folder: Path, trainer: Trainer) -> None:
    trimtab.Checkpointer(folder).save(trainer.progress["micro"], **trainer.parts())


def resume(folder: Path, trainer: Trainer) -> int | None:
    """The micro-batch it goes on from, or None where there is nothing to go on from."""
    found = trimtab.Checkpointer(folder).resume(**trainer.parts())
    return None if found is None else found.step


def main() -> None:
    """Resume what there is, train on, save now and then, and die where told."""
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("optimizer")
    options.add_argument("scheduler")
    options.add_argument("workers", type=int)
    options.add_argument("--seed", type=int)
    options.add_argument("--save-every", type=int, default=5)
    options.add_argument("--die-after")
    told = options.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(told.optimizer, told.scheduler, told.workers, told.seed)
    begun = resume(told.folder, trainer)
    print(json.dumps({"begun": begun}), flush=True)

    def after(place: str) -> None:
        if place.startswith("micro") and trainer.progress["micro"] % told.save_every == 0:
            save(told.folder, trainer)
        if place == told.die_after:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.run(after)
    save(told.folder / "end", trainer)


if __name__ == "__main__":
    main()
