"""One process of several that save and resume together: trains a small sharded model, and tells how it ended.

torchrun --nproc-per-node 2 -m tests.distributed.saving FOLDER JOBS_AS_JSON
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, ROWS = 5, 96


class Net(nn.Module):
    """Odd sizes, a buffer that each process has for itself, and dropout: random numbers of its own."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12)
        self.norm = nn.BatchNorm1d(12)
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.drop(torch.tanh(self.norm(self.up(x)))))
        return out


def built(way: str, dropout: float = 0.2) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    torch.manual_seed(0)
    model = Net(dropout)
    size = dist.get_world_size()
    if way == "alone":
        return model
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    if way == "tp":
        from torch.distributed.tensor import Replicate
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        plan = {"up": ColwiseParallel(output_layouts=Replicate())}
        return parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    from torch.distributed.fsdp import fully_shard

    shape = (2, size // 2) if way == "hsdp" else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def loader_of(rank: int, size: int) -> Any:
    from trimtab.checkpoint import ResumableLoader

    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(torch.arange(ROWS), x, x.sum(1, keepdim=True).tanh())
    return ResumableLoader(DataLoader(data, batch_size=4, sampler=DistributedSampler(data, size, rank, seed=3)))


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def digest(tensors: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().contiguous().numpy().tobytes() for t in tensors)).hexdigest()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What must be the same in the end: weights and moments of all, buffers and random numbers of this process."""
    moments = [whole(v) for one in optimizer.state.values() for v in one.values() if isinstance(v, Tensor)]
    return {
        "weights": digest([whole(p) for p in model.parameters()]),
        "moments": digest(moments),
        "buffers": digest(list(model.buffers())),
        "rng": digest([torch.get_rng_state()]),
    }


class Killed:
    """Ends this process at once, at a place that is given; nowhere where none is."""

    def __init__(self, where: dict[str, Any]) -> None:
        from trimtab.checkpoint.directory import DISK

        self._where, self.operations = where, 0
        DISK._gate = self._before

    def here(self, step: int, place: int) -> None:
        if (self._where.get("step"), self._where.get("place")) == (step, place):
            if self._where.get("raises"):
                raise RuntimeError("a fault of this rank")
            os.kill(os.getpid(), signal.SIGKILL)

    def _before(self, operation: str, path: Path) -> None:
        if "step-" in str(path):  # of a checkpoint, and not of the folder that it is in
            self.operations += 1
            if self.operations == self._where.get("operation"):
                os.kill(os.getpid(), signal.SIGKILL)


def train(
    folder: Path,
    *,
    way: str = "fsdp",
    steps: int = 20,
    every: int = 5,
    resume: bool = True,
    asynchronous: bool = False,
    bad: list[int] | None = None,
    quiet: int = 3,
    dropout: float = 0.2,
    kill: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train up to so many steps from the newest checkpoint; `bad`: step and rank of weights that become NaN.

    `kill`: the rank that is killed, and where: before its Nth operation on the disk, or in which step, and how far in.
    """
    from trimtab import Checkpointer, Guard

    rank, size = dist.get_rank(), dist.get_world_size()
    dies = Killed(
        {} if kill is None or kill["rank"] != rank or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0" else kill
    )
    model = built(way, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9)
    loader = loader_of(rank, size)
    torch.manual_seed(100 + rank)
    ckpt = Checkpointer(folder, keep_last=10, quiet_steps=quiet, asynchronous=asynchronous)
    seen: list[list[int]] = []
    with Guard(
        model,
        optimizer,
        scheduler=schedule,
        loader=loader,
        checkpoint=ckpt,
        checkpoint_every=every,
        run_dir=False,
    ) as guard:
        snapshot = guard.resume() if resume else None
        step = start = guard.lanes[""].attempts
        while step < steps:
            loader.sampler.set_epoch(guard.epoch)
            for ids, x, y in loader:
                seen.append(ids.tolist())
                dies.here(step, 0)
                loss = nn.functional.mse_loss(model(x), y)
                dies.here(step, 1)
                loss.backward()
                dies.here(step, 2)
                guard.step(loss)
                dies.here(step, 3)
                schedule.step()
                optimizer.zero_grad()
                step += 1
                if bad is not None and [step, rank] == bad:
                    with torch.no_grad():
                        next(model.parameters()).to_local().fill_(torch.nan)
                if step >= steps:
                    break
        told = state_of(model, optimizer)
    listed = [[s.step, s.state, list(s.parts)] for s in ckpt.list()]
    from_step = None if snapshot is None else snapshot.step
    told |= {"start": start, "from": from_step, "seen": seen, "listed": listed, "rejected": guard.rejected}
    return {**told, "operations": dies.operations, "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))}


def by_hand(
    folder: Path,
    *,
    way: str = "fsdp",
    load: bool = False,
    steps: int = 2,
    bad: int | None = None,
    full: int | None = None,
) -> dict[str, Any]:
    """`Checkpointer.save` and `resume` in a loop without a guard; the next step works after either.

    `bad`: the rank whose part holds a NaN; `full`: the one whose disk is full.
    """
    from trimtab import Checkpointer
    from trimtab.checkpoint.directory import Disk
    from trimtab.core.errors import CheckpointError

    rank = dist.get_rank()
    model = built(way)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(100 + rank)
    ckpt = Checkpointer(folder)

    def take(num: int) -> None:
        for _ in range(num):
            x = torch.randn(4, WIDTH)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    extra = {"rank": rank}
    if load:
        extra["rank"] = -1
        snapshot = ckpt.resume(model=model, optimizer=optimizer, extra=extra)
        assert snapshot is not None
        ended, path = snapshot.state, str(snapshot.path)
    else:
        take(3)
        if rank == bad:
            with torch.no_grad():
                next(model.parameters()).to_local()[0, 0] = torch.nan
        if rank == full:

            def refuse(self: Disk, fd: int, path: Path) -> None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

            Disk.fsync = refuse
        try:
            snapshot = ckpt.save(3, model=model, optimizer=optimizer, extra=extra, metrics={"loss": 0.5})
            ended, path = snapshot.state, str(snapshot.path)
        except CheckpointError as error:
            ended, path = "failed", str(error)
    take(steps)
    return {**state_of(model, optimizer), "extra": extra, "state": ended, "path": path}


KINDS = {"train": train, "by_hand": by_hand}


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    for name, (place, settings) in jobs.items():
        kind = KINDS[settings.pop("kind", "train")]
        told = kind(folder / place, **settings)
        (folder / f"{name}-{dist.get_rank()}.json").write_text(json.dumps(told))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
