"""Sharded parameters (DTensor, as FSDP2 uses them): every rank measures its own part."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from trimtab import Guard
from trimtab.core.types import Column, Kind
from trimtab.record.reader import read_run


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[object]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")  # torch.distributed warns about its own set-up
def test_dtensor_parameters_are_measured_and_guarded(mesh: object) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    for name, p in list(model.named_parameters()):
        setattr(model, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)])))  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with Guard(model, optimizer, clip=1.0) as guard:
        for step in range(4):
            loss = (model.weight.square().sum() + model.bias.square().sum()).full_tensor()
            if step == 2:
                loss = loss * math.nan
            before = model.weight.full_tensor().detach().clone()
            loss.backward()
            want = float(model.weight.grad.full_tensor().norm())
            guard.step(loss)
            if step == 2:
                assert torch.equal(before, model.weight.full_tensor())
            elif step == 0:
                first = want
            optimizer.zero_grad()
    assert guard.rejected == 1
    assert guard.run_dir is not None
    sample = next(iter(read_run(guard.run_dir).samples()))
    norms = dict(zip(sample.names(Kind.GRAD), sample.col(Kind.GRAD, Column.L2), strict=True))
    assert norms["weight"] == pytest.approx(first, rel=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", ["model", "models", "ema"])
def test_checkpoints_of_sharded_parameters_are_saved_and_resumed(mesh: object, tmp_path: Path, part: str) -> None:
    from torch.distributed.tensor import Shard, distribute_tensor

    from trimtab import Checkpointer

    model = nn.Linear(8, 4)
    weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))  # type: ignore[arg-type]
    model.weight = weight
    given: Any = (
        {"model": model} if part == "model" else {"model": {"one": model}} if part == "models" else {part: model}
    )
    assert Checkpointer(tmp_path).save(1, **given).state == "candidate"
    before = weight.full_tensor().detach().clone()
    with torch.no_grad():
        weight.zero_()
    assert Checkpointer(tmp_path).resume(**given) is not None
    assert model.weight is weight
    assert torch.equal(weight.full_tensor(), before)
