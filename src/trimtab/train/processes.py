"""A training in several processes, started by torchrun: who is who, where each saves, and where all can resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trimtab.checkpoint.directory import entries
from trimtab.core.errors import InputError

HOW = "torchrun --nproc-per-node 2 -m trimtab train NAME --use-ddp ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One of the processes of a training; the first of them prints, records and saves to the folder that was given."""

    rank: int = 0
    num: int = 1
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether it is the one that speaks for all."""
        return self.rank == 0

    def folder(self, given: Path | None) -> Path | None:
        """Where this process keeps its checkpoints: each has random numbers and a place in the data of its own."""
        return given if given is None or self.first else Path(given) / f"rank{self.rank}"


@contextmanager
def joined(device: torch.device, *, wanted: bool) -> Iterator[Process]:
    """Join the processes that torchrun started, and leave them at the end; without `wanted` there is one process."""
    if not wanted:
        yield Process(device=device)
        return
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys():
        raise InputError(f"--use-ddp needs several processes, which torchrun starts: {HOW}")
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield Process(rank=dist.get_rank(), num=dist.get_world_size(), device=device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def newest_common(root: Path) -> Path | None:
    """The newest checkpoint that every process has, as a path below this process's own folder; None without any.

    A kill may come after one process has saved a step and before another has: going on from different steps would
    train different models.
    """
    stages = (one for one in sorted(root.iterdir()) if one.is_dir() and one.name[:1].isdigit()) if root.is_dir() else ()
    own = {
        ("" if folder == root else folder.name, entry.step, entry.branch): entry.path
        for folder in (root, *stages)
        for entry in entries(folder)
    }
    every: list[set[tuple[str, int, int]]] = [set()] * dist.get_world_size()
    dist.all_gather_object(every, set(own))
    common = set.intersection(*every)
    return own[max(common)] if common else None


def share_buffers(*models: nn.Module | None) -> None:
    """Give every process the running statistics of the first, so that all measure the same."""
    for model in models:
        for buffer in model.buffers() if model is not None else ():
            dist.broadcast(buffer, 0)
