"""What each process of tests/losses/test_distributed.py does: all cases in one go, results to a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.losses import distributed, nway_loss

Settings = dict[str, Any]
SIZES = {3: (3, 1, 3), 2: (4, 2)}
"""Rows per rank, for the group of all three processes and for the group of the last two."""

CASES: dict[str, Settings] = {
    "axis mip": {"objective": "axis", "similarity": "mip"},
    "axis norm, smoothed": {"objective": "axis", "similarity": "norm", "label_smoothing": 0.1},
    "joint paircos": {"objective": "joint", "similarity": "paircos"},
    "joint dist": {"objective": "joint", "similarity": "dist"},
    "full mip materialize": {"objective": "full", "similarity": "mip", "backend": "materialize"},
    "full mip stream": {"objective": "full", "similarity": "mip", "backend": "stream"},
    "full norm gram": {"objective": "full", "similarity": "norm", "backend": "gram"},
    "full dist, smoothed": {"objective": "full", "similarity": "dist", "label_smoothing": 0.2},
    "full paircos contract": {"objective": "full", "similarity": "paircos", "backend": "contract"},
    "full mip, sum": {"objective": "full", "similarity": "mip", "reduction": "sum"},
    "pairwise norm": {"objective": "pairwise", "similarity": "norm"},
    "sigmoid mip": {"objective": "sigmoid", "similarity": "mip", "logit_bias": -1.5},
}
SAMPLED: Settings = {"objective": "sampled", "similarity": "norm", "num_samples": 2}
MASKED = ("axis mip", "joint paircos", "full mip stream", "full norm gram", "pairwise norm")


def rows(total: int, num: int = 3, width: int = 5, seed: int = 3) -> list[Tensor]:
    """The whole batch: related rows, float64."""
    draw = torch.Generator().manual_seed(seed)
    shared = torch.randn(total, width, generator=draw, dtype=torch.float64)
    return [shared + torch.randn(total, width, generator=draw, dtype=torch.float64) for _ in range(num)]


def mask_of(total: int, num: int = 3) -> Tensor:
    """Two entries missing, one of them in the last row."""
    mask = torch.ones(num, total, dtype=torch.bool)
    mask[1, 1] = mask[0, total - 1] = False
    return mask


def result_of(xs: Sequence[Tensor], settings: Settings, mask: Tensor | None = None, **more: Any) -> dict[str, Tensor]:
    """Loss and gradients of rows and scale."""
    leaves = [x.clone().requires_grad_() for x in xs]
    scale = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    loss = nway_loss(leaves, logit_scale=scale, mask=mask, **settings, **more)
    loss.backward()
    assert scale.grad is not None
    return {"loss": loss.detach(), "grad": torch.stack([x.grad for x in leaves]), "scale": scale.grad}  # type: ignore[arg-type]


def own(tensor: Tensor, sizes: Sequence[int], rank: int, dim: int) -> Tensor:
    """This rank's part of the whole batch."""
    return tensor.split(list(sizes), dim)[rank]  # type: ignore[no-untyped-call,no-any-return]


def model_of() -> nn.ModuleList:
    """One small encoder per modality."""
    torch.manual_seed(5)
    return nn.ModuleList(nn.Linear(5, 4).double() for _ in range(3))


class Wrapped(nn.Module):
    """A model whose forward pass ends in the loss, as data-parallel training wants it."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.encoders = model_of()
        self.log_scale = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.group = group

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        encoded = [encoder(x) for encoder, x in zip(self.encoders, xs, strict=True)]
        loss: Tensor = nway_loss(
            encoded, similarity="norm", objective="full", logit_scale=self.log_scale.exp(), group=self.group
        )
        return loss


def parallel(group: Any, mine: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradients of a model under DistributedDataParallel."""
    model = nn.parallel.DistributedDataParallel(Wrapped(group), process_group=group)
    model(mine).backward()
    return {name.removeprefix("module."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@contextmanager
def counted() -> Any:
    """Bytes given to collectives, by name."""
    sent: dict[str, int] = {}
    kept = {name: getattr(distributed, name) for name in ("_all_gather", "_reduce_scatter")}
    reduce = dist.all_reduce

    def count(name: str, call: Callable[..., Any], which: int) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            sent[name] = sent.get(name, 0) + args[which].numel() * args[which].element_size()
            return call(*args, **kwargs)

        return wrapped

    distributed._all_gather = count("gather", kept["_all_gather"], 0)
    distributed._reduce_scatter = count("scatter", kept["_reduce_scatter"], 1)
    dist.all_reduce = count("reduce", reduce, 0)
    try:
        yield sent
    finally:
        distributed._all_gather, distributed._reduce_scatter = kept["_all_gather"], kept["_reduce_scatter"]
        dist.all_reduce = reduce


def said(call: Callable[[], object]) -> str:
    """The error a call ends with."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def cases(group: Any, rank: int, world: int) -> dict[str, Any]:
    """Everything a group of this size is asked."""
    sizes = SIZES[world]
    whole, mask = rows(sum(sizes)), mask_of(sum(sizes))
    mine = [own(x, sizes, rank, 0) for x in whole]
    out: dict[str, Any] = {name: result_of(mine, settings, group=group) for name, settings in CASES.items()}
    my_mask = own(mask, sizes, rank, 1)
    for name in MASKED:
        given = None if bool(my_mask.all()) else my_mask  # a rank without gaps need not bring a mask
        out[f"{name}, masked"] = result_of(mine, CASES[name], given, group=group)
    torch.manual_seed(100 + rank)  # ranks whose generators differ must still draw the same index sets
    out["sampled"] = result_of(mine, SAMPLED, group=group)
    out["none"] = nway_loss(mine, objective="full", similarity="mip", reduction="none", group=group)
    out["parallel"] = parallel(group, mine)
    return out


def once(group: Any, rank: int) -> dict[str, Any]:
    """What need not be asked for every size: the group of the last two, here with equal parts."""
    mine = [own(x, (3, 3), rank, 0) for x in rows(6)]
    full = {"objective": "full", "similarity": "mip", "group": group}
    out: dict[str, Any] = {}
    bad = [x.clone().requires_grad_() for x in mine]
    if rank == 1:
        bad[0].data[0, 0] = math.nan
    for objective in ("axis", "full", "pairwise"):
        loss = nway_loss(bad, objective=objective, similarity="norm", group=group)
        loss.backward()
        out[f"nan {objective}"] = loss.detach()
    leaves = [x.clone().requires_grad_(rank == 0) for x in mine]  # one rank's encoders are frozen
    nway_loss(leaves, **full).backward()
    out["frozen"] = None if leaves[0].grad is None else torch.stack([x.grad for x in leaves])  # type: ignore[arg-type]
    with torch.no_grad():
        out["no grad"] = nway_loss(mine, **full)
    out["weighted"] = result_weighted(mine, rank, full)
    out["bf16"] = nway_loss([x.bfloat16() for x in mine], **full)
    wrong = mine if rank == 0 else [mine[0], mine[1][:, :3], mine[2]]
    out["wrong shape"] = said(lambda: nway_loss(wrong, **full))
    narrow = mine if rank == 0 else [x[:, :3] for x in mine]
    out["other width"] = said(lambda: nway_loss(narrow, **full))
    out["other settings"] = said(lambda: nway_loss(mine, objective=("full", "axis")[rank], group=group))
    out["poor rank"] = said(lambda: nway_loss(mine, **full, budget_bytes=(None, 1)[rank]))
    scatter = distributed._reduce_scatter
    distributed._reduce_scatter = lacking
    out["lacking"] = result_of(mine, {"objective": "full", "similarity": "mip"}, group=group)
    distributed._reduce_scatter = scatter
    for num in (2, 3, 4):
        with counted() as sent:
            result_of([own(x, (3, 3), rank, 0) for x in rows(6, num)], {"objective": "full"}, group=group)
        out[f"sent {num}"] = sent
    return out


def lacking(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("ProcessGroupGloo does not support reduce_scatter")


def result_weighted(mine: Sequence[Tensor], rank: int, full: Settings) -> Tensor:
    """Only the second rank wants the loss at all, and wants three of it."""
    leaves = [x.clone().requires_grad_() for x in mine]
    (nway_loss(leaves, **full) * (0.0, 3.0)[rank]).backward()
    return torch.stack([x.grad for x in leaves])  # type: ignore[arg-type]


def work(rank: int, folder: str) -> None:
    """One of three processes."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    out: dict[str, Any] = {}
    try:
        everybody = dist.group.WORLD
        pair = dist.new_group([1, 2])  # whose ranks are not those of the processes
        out[3] = cases(everybody, rank, 3)
        if rank > 0:
            out[2] = cases(pair, rank - 1, 2)
            out["once"] = once(pair, rank - 1)
        else:
            out["stranger"] = said(lambda: nway_loss(rows(4), group=pair))
        torch.save(out, Path(folder) / f"{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
