"""One process of several, started by torchrun: trains a small model in one of several ways, and tells what it saw.

torchrun --nproc-per-node 2 -m tests.distributed.worker WAY FOLDER SETTINGS_AS_JSON
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.simulated_device import simulated_device

NUM_ROWS, WIDTH = 32, 6


class Net(nn.Module):
    """Sizes that no number of processes divides, and a bias smaller than their number: some hold nothing of it."""

    def __init__(self, middle: int = 13) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, middle)
        self.mid = nn.Linear(middle, 7)
        self.out = nn.Linear(7, 1)

    def forward(self, where: Tensor, x: Tensor | None = None) -> Tensor:
        x = where if x is None else x
        hidden: Tensor = self.out(torch.tanh(self.mid(torch.tanh(self.up(x)))))
        return hidden


def batch_of(step: int, rank: int, size: int) -> Tensor:
    """This process's rows of the batch of a step."""
    whole = torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return whole.reshape(size, NUM_ROWS // size, WIDTH)[rank]


def built(way: str) -> nn.Module:
    torch.manual_seed(0)
    model = Net(12 if way in ("tp", "alone, even") else 13)
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way.startswith("alone"):
        return model
    from torch.distributed.device_mesh import init_device_mesh

    size = dist.get_world_size()
    if way == "tp":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        plan = {"up": ColwiseParallel(), "mid": RowwiseParallel()}
        return parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    from torch.distributed.fsdp import fully_shard

    shape = (2, size // 2) if way == "hsdp" else (size,)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for part in (model.up, model.mid):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def train(
    way: str,
    folder: Path,
    *,
    steps: int = 30,
    clip: float | None = None,
    guards: list[int] | None = None,
    bad: list[list[int]] | None = None,
    mode: str = "advise",
    plain_clip: float | None = None,
    optimizer: str = "AdamW",
    same_data: bool = False,
    odd: int | None = None,
    moved: list[int] | None = None,
    fails: list[int] | None = None,
    positions: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """`guards`: the ranks that have one, if not all; `bad`: step and rank of every batch with a NaN.

    `same_data`: all train on the batches of rank 0. `odd`: the rank with targets of chance. `moved`: step and rank of a
    change of the weights in one process. `fails`: step and rank at which a guard's own look at a step raises.
    `positions`: the first input is the same in all of them, and another one in every step.
    """
    from trimtab import Guard

    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    spread = size if way in ("ddp", "fsdp", "hsdp") else 1
    model = built(way)
    stepper = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2, **settings)
    guard = None
    if guards is None or rank in guards:
        guard = Guard(model, stepper, clip=clip, mode=mode, config={"full_every": 10}, run_dir=folder / f"{rank}")
    norms, losses = [], []
    for step in range(steps):
        x = batch_of(step, rank if spread > 1 and not same_data else 0, spread)
        target = x.sum(1, keepdim=True).tanh()
        if rank == odd:
            target = 3.0 * torch.randn(len(x), 1, generator=torch.Generator().manual_seed(1000 + step))
        if [step, rank] == moved:
            with torch.no_grad():
                next(model.parameters()).mul_(1.001)
        if [step, rank] in (bad or []):
            x = x.clone()
            x[1, 2] = math.nan
        if guard is not None and [step, rank] == fails:
            guard.lanes[""].watch._wiring = guard.lanes[""].watch._layers = None  # the next look at them raises
        inputs = (torch.arange(20.0) + step, x) if positions else (x,)
        loss = nn.functional.mse_loss(model(*inputs), target)
        loss.backward()
        norms.append(math.sqrt(sum(float(whole(p.grad).double().square().sum()) for p in model.parameters())))
        losses.append(float(loss))
        if plain_clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), plain_clip)
        if guard is not None:
            guard.step(loss)
        else:
            stepper.step()
        stepper.zero_grad()
    told: dict[str, Any] = {
        "norms": norms,
        "losses": losses,
        "weights": {name: whole(p.detach()).double().tolist() for name, p in model.named_parameters()},
        "counts": sorted({float(s["step"]) for s in stepper.state.values() if "step" in s}),
    }
    if guard is not None:
        guard.close()
        from trimtab.record.reader import read_run

        samples = [s for s in read_run(guard.run_dir).samples() if s.phase == "train"]
        told["rejected"] = guard.rejected
        told["unseen"] = sorted({s.notes["unseen_ranks"] for s in samples if "unseen_ranks" in s.notes})
        told["findings"] = [[f.step, f.name, f.message, list(f.subject)] for f in guard.findings]
        told["names"] = [s.layout.names for s in samples]
        told["tables"] = [s.table.astype(float).tolist() for s in samples]
        told["scalars"] = [{k: float(v) for k, v in s.scalars.items()} for s in samples]
    return told


def stages(
    folder: Path, *, steps: int = 30, clip: float | None = None, bad: list[list[int]] | None = None
) -> dict[str, Any]:
    """Two pipeline stages: the first process has the first layer, the second one the others and the loss."""
    from trimtab import Guard

    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    model = net.up if rank == 0 else nn.Sequential(net.mid, nn.Tanh(), net.out)
    stepper = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = {"full_every": 10, "stages": True}
    with Guard.attach(model, stepper, config, clip=clip, run_dir=folder / f"{rank}") as guard:
        for step in range(steps):
            x = batch_of(step, 0, 1)
            target = x.sum(1, keepdim=True).tanh()
            if [step, rank] in (bad or []):
                x[1, 2] = math.nan
            if rank == 0:
                hidden = torch.tanh(model(x))
                dist.send(hidden.detach(), 1)
                back = torch.empty_like(hidden)
                dist.recv(back, 1)
                hidden.backward(back)
            else:
                hidden = torch.empty(NUM_ROWS, 13)
                dist.recv(hidden, 0)
                hidden.requires_grad_()
                loss = nn.functional.mse_loss(model(hidden), target)
                loss.backward()
                dist.send(hidden.grad, 0)
                guard.observe(loss=loss)
            stepper.step()
            stepper.zero_grad()
    from trimtab.record.reader import read_run

    samples = [s for s in read_run(guard.run_dir).samples() if s.phase == "train"]
    names = {"weight": "up.weight"} if rank == 0 else {"0.weight": "mid.weight", "2.weight": "out.weight"}
    return {
        "weights": {names[n]: p.detach().double().tolist() for n, p in model.named_parameters() if n in names},
        "rejected": guard.rejected,
        "findings": [[f.step, f.name, f.message, list(f.subject)] for f in guard.findings],
        "norms": [float(s.scalars["grad_norm"]) for s in samples],
        "counts": sorted({float(s["step"]) for s in stepper.state.values()}),
    }


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, jobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    if "TRIMTAB_TEST_WAIT_S" in os.environ:
        from trimtab.sample import reduce

        reduce.WAIT_S = float(os.environ["TRIMTAB_TEST_WAIT_S"])
    rank = os.environ.get("RANK", "0")
    for name, (way, settings) in jobs.items():
        with simulated_device() if settings.pop("away", False) else nullcontext():
            kind = stages if way == "stages" else partial(train, way)
            told = kind(folder / name, **settings)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(told))
    if dist.is_initialized():
        dist.barrier()  # a process that leaves while another still hears from it may abort
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
    # Not through the end of the interpreter: a thread of gloo's aborts there in some runs, with a guard or without.
    sys.stdout.flush()
    os._exit(0)
